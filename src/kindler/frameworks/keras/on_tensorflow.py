"""Keras on TensorFlow, Keras 2 included: gradients leave the graph through one stateful host call.

TensorFlow runs such calls in program order, so all ranks exchange in the same order, under `tf.function`,
in eager mode, and with several steps per execution.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from kindler.collective import Array
from kindler.frameworks.devices import missing_gpu, quiet_without_gpu
from kindler.frameworks.keras.gradient_hook import Means, Rows, count, mapped, scaled_loss
from kindler.frameworks.row_gather import RowGather

_COMPILED = "_kindler_apply"  # what `apply` keeps on an optimizer
READS_AHEAD = False


def configure(*, device: str, local_rank: int, threads: int | None) -> None:
    """A process that has already computed keeps what it has."""
    gpus: list[Any] | None = None
    try:
        if threads is not None:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        with quiet_without_gpu():
            gpus = tf.config.list_physical_devices("GPU")
        mine = [] if device == "cpu" else [gpus[local_rank % len(gpus)]] if gpus else []
        tf.config.set_visible_devices(mine, "GPU")
        for gpu in mine:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        pass
    if device.startswith("cuda") and gpus == []:
        raise missing_gpu(device, "TensorFlow", "tensorflow[and-cuda]")


def on_gpu() -> bool:
    return bool(tf.config.get_visible_devices("GPU"))


def taken_bytes() -> int:
    return int(tf.config.experimental.get_memory_info("GPU:0")["current"]) if on_gpu() else 0


def goes_back(model: Any) -> bool:
    return not model.run_eagerly  # where random operations count by themselves


def raw(model: Any, variables: Sequence[Any], judged: Any) -> Any:
    # A third of the time of the variable's own method.
    read = tf.raw_ops.ReadVariableOp
    values = (_value(variable) for variable in variables)
    return [[read(resource=value.handle, dtype=value.dtype).numpy() for value in values], judged]


class DrawingOps:
    """Finds stateful random operations, whose seeds are fixed on compilation; Keras 3 layers use none.

    `found` is None as long as nothing was compiled.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.found: bool | None = None
        for name in ("train_step", "test_step"):
            object.__setattr__(model, name, self._looking(getattr(model, name)))

    def begin_epoch(self) -> None:
        if self.found:
            self._model.make_train_function(force=True)
            self._model.make_test_function(force=True)

    def _looking(self, step: Any) -> Any:
        def looked(*args: Any) -> Any:
            logs = step(*args)
            if not tf.executing_eagerly():
                self.found = self.found or _draws(tf.compat.v1.get_default_graph())
            return logs

        return looked


def _draws(graph: Any) -> bool:
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for part in definition.library.function for node in part.node_def)]
    return any("seed2" in node.attr for node in nodes)


def seed(number: int, *, compiled: bool) -> None:
    """`compiled` drops all compiled functions, which take from a tenth of a second to many to make again."""
    from tensorflow.python.eager import context

    if compiled:
        tf.random.set_seed(number)
    else:
        running = context.context()
        running._seed, running._rng = number, random.Random(number)
    if "tf_keras" in sys.modules:  # Keras 2 draws from a generator of its own once it was seeded
        sys.modules["tf_keras.src.backend"]._SEED_GENERATOR.generator = random.Random(number)


def judge_once(model: Any, batch: Any) -> None:
    """Create what Keras 2 only creates on evaluation: weights, losses, metrics."""
    model.test_step(tf.nest.map_structure(tf.convert_to_tensor, batch))
    model.reset_metrics()


def gradients(model: Any, inputs: Any, targets: Any, weights: Any) -> list[Array | None]:
    """Also updates the metrics."""
    inputs, targets, weights = mapped((inputs, targets, weights), tf.convert_to_tensor)
    with tf.GradientTape() as tape:
        outputs = model(inputs, training=True)
        loss = model.compute_loss(inputs, targets, outputs, weights)
        scaled = scaled_loss(model, loss)
    found = tape.gradient(scaled, [_value(variable) for variable in model.trainable_variables])
    count(model, loss, int(row_count(inputs)), inputs, targets, outputs, weights)
    return [None if grad is None else tf.convert_to_tensor(grad).numpy() for grad in found]


def called(model: Any, step: Any, data: Any) -> None:
    step(mapped(data, tf.convert_to_tensor))


def as_array(grad: Any) -> Any:
    return tf.convert_to_tensor(grad).numpy()


def apply(optimizer: Any, gradients: Sequence[Array], variables: Sequence[Any]) -> None:
    known = [id(variable) for variable in variables]
    if vars(optimizer).get(_COMPILED, [None])[0] != known:

        @tf.function  # type: ignore[untyped-decorator]
        def apply_all(*grads: Any) -> None:
            optimizer.apply_gradients(list(zip(grads, variables, strict=True)))

        object.__setattr__(optimizer, _COMPILED, (known, apply_all))
    vars(optimizer)[_COMPILED][1](*map(tf.convert_to_tensor, gradients))


def dense(grad: Any, variable: Any) -> Any:
    return tf.zeros(variable.shape, variable.dtype) if grad is None else tf.convert_to_tensor(grad)


def gather(ranks: RowGather, rows: Rows, exchange: Any) -> Any:
    def there(own: Any, count: Any) -> Any:
        with exchange.kept():
            own = own if count else own[:0]  # of a row of zeros nothing is given
            counts = ranks.agree(len(own), f"{own.dtype} {own.shape[1:]}")
            return ranks.rows(own, counts), counts

    def back(gradient: Any, counts: Any, count: Any, like: Any) -> Any:
        with exchange.kept():
            own = ranks.returned(gradient, [int(part) for part in counts], float(count))
            return own if count else like * 0

    def gathered(tensor: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def of_all(own: Any) -> Any:
            count = tf.cast(rows.now, tf.int64)
            whole, counts = tf.numpy_function(there, [own, count], [own.dtype, tf.int64])
            whole.set_shape([None, *own.shape[1:]])

            def upstream(gradient: Any) -> Any:
                returned = tf.numpy_function(back, [gradient, counts, count, own], gradient.dtype)
                returned.set_shape(own.shape)
                return returned

            return whole, upstream

        return of_all(tf.convert_to_tensor(tensor))

    return gathered


def idle_step(step: Any, rows: Rows, model: Any, data: Any) -> Any:
    """Without rows, computes on a zero row of no weight."""
    data = tuple(part for part in data if part is not None)  # a batch by itself may lack weights
    some = tf.cond(rows.now > 0, lambda: data, lambda: tf.nest.map_structure(_one_row, data))
    for part, like in zip(tf.nest.flatten(some), tf.nest.flatten(data), strict=True):
        part.set_shape([None, *like.shape[1:]])
    counted = {id(v): v for metric in model.metrics for v in metric.variables}
    kept = [_value(variable) for variable in (*model.non_trainable_variables, *counted.values())]
    before = [tf.identity(variable) for variable in kept]
    logs = step(some)
    for variable, value in zip(kept, before, strict=True):
        variable.assign(tf.where(rows.now > 0, tf.identity(variable), value))
    return logs


def after(grads: Sequence[Any]) -> AbstractContextManager[Any]:
    waited: AbstractContextManager[Any] = tf.control_dependencies([g for g in grads if g is not None])
    return waited


def exchange(grads: list[Any], means: Means, rows: Rows) -> list[Any]:
    dense = [tf.convert_to_tensor(grad) for grad in grads]  # embeddings give slices of rows
    weight = tf.cast(rows.now, tf.float64)
    shared = tf.numpy_function(
        lambda n, *arrays: means(arrays, float(n)), [weight, *dense], [grad.dtype for grad in dense]
    )
    shared = list(shared) if isinstance(shared, list | tuple) else [shared]
    for mean, grad in zip(shared, dense, strict=True):
        mean.set_shape(grad.shape)
    return shared


def row_count(data: Any) -> Any:
    return tf.shape(tf.nest.flatten(data)[0])[0]


def _one_row(part: Any) -> Any:
    if part.shape[1:].is_fully_defined():
        return tf.zeros([1, *part.shape[1:]], part.dtype)
    return tf.zeros(tf.concat([[1], tf.shape(part)[1:]], 0), part.dtype)


def _value(variable: Any) -> Any:
    return getattr(variable, "value", variable) if not isinstance(variable, tf.Variable) else variable
