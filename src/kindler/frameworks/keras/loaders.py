"""`tf.data` and indexed Keras datasets on several ranks.

TensorFlow itself shards a `tf.data.Dataset`: by file if there are enough, else by batch, and not at all if
its options say so. Made on the driver, it travels as its graph.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

from kindler.errors import ConfigError
from kindler.frameworks.keras.dataset import with_own_threads
from kindler.frameworks.loaders import Dealing, cannot_travel, pickled, says_sharded

_HOST_CODE = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless"})
_SHUFFLES = ("ShuffleDataset", "ShuffleAndRepeatDataset")


def open_dataset(dataset: Any, dealing: Dealing) -> _Dataset:
    return _Dataset(dataset, dealing)


def open_indexed(made: Any, dealing: Dealing) -> _Indexed:
    return _Indexed(made, dealing)


def pack_indexed(made: Any) -> Callable[[], Any]:
    return pickled(made)


def pack_dataset(dataset: Any) -> Callable[[], Any]:
    import tensorflow as tf

    try:
        graph = _graph_of(tf, dataset._variant_tensor)
        spec = pickle.dumps(dataset.element_spec)
    except (tf.errors.OpError, pickle.PicklingError, TypeError, AttributeError) as exc:
        raise ConfigError(cannot_travel(dataset, str(exc).partition("\n")[0])) from exc
    parsed = tf.compat.v1.GraphDef.FromString(graph)
    found = sorted({node.op for node in _nodes(parsed)} & _HOST_CODE)
    if found:
        raise ConfigError(cannot_travel(dataset, f"it calls Python code ({', '.join(found)})"))
    policy = int(dataset.options().experimental_distribute.auto_shard_policy)
    _seed_shuffles(tf, parsed)
    return partial(unpack_dataset, parsed.SerializeToString(), spec, policy)


def _graph_of(tf: Any, variant: Any) -> bytes:
    """In TensorFlow 1 programs the dataset is a tensor that a session must evaluate."""
    in_graph = isinstance(getattr(variant, "graph", None), tf.Graph) and not hasattr(variant, "numpy")
    with variant.graph.as_default() if in_graph else nullcontext():
        packed = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=1, strip_device_assignment=True
        )
        if not in_graph:
            return bytes(packed.numpy())
        with tf.compat.v1.Session(graph=variant.graph) as session:
            return bytes(session.run(packed))


def unpack_dataset(graph: bytes, spec: bytes, policy: int) -> Any:
    """`spec` is a pickle, so it must come from our own channel."""
    import tensorflow as tf
    from tensorflow.python.data.ops.dataset_ops import _VariantDataset

    dataset = _VariantDataset(tf.raw_ops.DatasetFromGraph(graph_def=graph), pickle.loads(spec))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy(policy)
    return dataset.with_options(options)


class _Dataset:
    fresh = True

    def __init__(self, dataset: Any, dealing: Dealing) -> None:
        import tensorflow as tf

        off = tf.data.experimental.AutoShardPolicy.OFF
        own = says_sharded(dataset) or dataset.options().experimental_distribute.auto_shard_policy == off
        self.cut = dealing.whole and dealing.size > 1 and not own
        shards = dealing.size > 1 and not dealing.whole and not own
        self._dataset = with_own_threads(_sharded(tf, dataset, dealing) if shards else dataset)

    def length(self) -> float | None:
        cardinality = int(self._dataset.cardinality())
        return math.inf if cardinality == -1 else None if cardinality < 0 else cardinality

    def batches(self, number: int) -> Generator[Any, None, None]:
        import tensorflow as tf

        with tf.init_scope():  # Keras asks from within a graph of its own
            items = iter(self._dataset)
        while True:
            try:
                with tf.init_scope():
                    batch = next(items)
            except StopIteration:
                return
            yield batch

    def close(self) -> None:
        """TensorFlow ends what it started."""


class _Indexed:
    fresh = False

    def __init__(self, made: Any, dealing: Dealing) -> None:
        self._made, self._dealing = made, dealing
        self._sharded = says_sharded(made)
        self.cut = dealing.whole and dealing.size > 1 and not self._sharded

    def length(self) -> float | None:
        length = self._count()
        if length is None:
            return math.inf
        return length if self._sharded or self.cut else self._dealing.share_of(length)

    def batches(self, number: int) -> Generator[Any, None, None]:
        count, drawing = self._count(), self._dealing.drawing(number)
        with drawing:
            self._tell("on_epoch_begin")
        whole = self._sharded or self.cut
        first, every = (0, 1) if whole else (self._dealing.rank, self._dealing.size)
        for place in itertools.count(first, every):
            if count is not None and place >= count:
                break
            yield self._made[place]
        with drawing:  # where such a dataset shuffles, for the next pass
            self._tell("on_epoch_end")

    def close(self) -> None:
        """Nothing was started."""

    def _count(self) -> int | None:
        if hasattr(self._made, "num_batches"):
            count: int | None = self._made.num_batches
            return count
        return len(self._made)

    def _tell(self, name: str) -> None:
        hook = getattr(self._made, name, None)
        if hook is not None:
            hook()


def _sharded(tf: Any, dataset: Any, dealing: Dealing) -> Any:
    from tensorflow.python.data.experimental.ops.distribute import _AutoShardDataset

    if dealing.unit == "batches":
        return dataset.shard(dealing.size, dealing.rank)
    auto = tf.data.experimental.AutoShardPolicy.AUTO
    if dataset.options().experimental_distribute.auto_shard_policy == auto:
        # With fewer files than ranks it is the first rank's part that complains, and all must decide alike.
        try:
            next(iter(_AutoShardDataset(dataset, dealing.size, 0)), None)
        except tf.errors.InvalidArgumentError:
            return dataset.shard(dealing.size, dealing.rank)
    return _AutoShardDataset(dataset, dealing.size, dealing.rank)


def _nodes(graph: Any) -> Iterator[Any]:
    return itertools.chain(graph.node, *(function.node_def for function in graph.library.function))


def _seed_shuffles(tf: Any, graph: Any) -> None:
    """Seed unseeded shuffles: all ranks must see the same order to take their parts of it."""
    bodies = [(graph.node, ""), *((function.node_def, ":output:0") for function in graph.library.function)]
    for nodes, output in bodies:
        constants = {node.name: node for node in nodes if node.op == "Const"}
        for place, node in enumerate([node for node in nodes if node.op.startswith(_SHUFFLES)]):
            names = [name.partition(":")[0] for name in node.input[2:4]]
            seeds = [constants[name] for name in names if name in constants]
            if len(seeds) < 2 or any(int(tf.make_ndarray(seed.attr["value"].tensor)) for seed in seeds):
                continue
            for number, seed in enumerate(seeds):
                fresh = nodes.add()
                fresh.CopyFrom(seed)
                fresh.name = f"kindler_seed_{place}_{number}"
                fresh.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(place + 1, dtype=tf.int64))
                node.input[2 + number] = fresh.name + output
