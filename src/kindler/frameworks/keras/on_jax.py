"""Keras on JAX: gradients leave the jitted step through a host callback.

Shapes are static under `jit`: two local batch sizes mean two compilations.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kindler.collective import Array
from kindler.errors import ConfigError
from kindler.frameworks.devices import missing_gpu
from kindler.frameworks.keras.gradient_hook import Means, Rows, count
from kindler.frameworks.row_gather import RowGather

# Its own type hints are partial, which a strict checker takes amiss.
jax: Any = importlib.import_module("jax")
jnp: Any = jax.numpy


READS_AHEAD = False
_UNDOABLE = "_kindler_train_function"


def configure(*, device: str, local_rank: int, threads: int | None) -> None:
    """A process that has already computed keeps what it has."""
    if threads is not None:
        os.environ["NPROC"] = str(threads)
        if threads == 1:
            flags = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    else:
        jax.config.update("jax_cuda_visible_devices", str(local_rank))
    if device.startswith("cuda") and not on_gpu():
        raise missing_gpu(device, "JAX", "jax[cuda12]")


def keep_compiled(folder: Path) -> None:
    """Keep compiled code there, and use what is there. JAX's own cache takes none that calls back."""
    compiler: Any = importlib.import_module("jax._src.compiler")
    compile_anew = getattr(compiler, "backend_compile_and_load", None)
    if compile_anew is None:  # another version of JAX: it only takes longer
        return
    folder.mkdir(exist_ok=True)

    def found_or_made(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any) -> Any:
        path = folder / hashlib.sha256(str(module).encode()).hexdigest()
        with suppress(OSError, jax.errors.JaxRuntimeError):
            return backend.deserialize_executable(path.read_bytes(), devices, options, callbacks)
        made = compile_anew(backend, module, devices, options, callbacks)
        with suppress(OSError, jax.errors.JaxRuntimeError):
            unfinished = path.with_suffix(".part")
            unfinished.write_bytes(made.serialize())
            unfinished.replace(path)
        return made

    compiler.backend_compile_and_load = found_or_made


def on_gpu() -> bool:
    return bool(jax.default_backend() == "gpu")


def taken_bytes() -> int:
    counted = jax.local_devices()[0].memory_stats() if on_gpu() else None
    return int((counted or {}).get("bytes_in_use", 0))


def goes_back(model: Any) -> bool:
    return True


def keep_steps(model: Any) -> None:
    """Put back what a step began with when it fails; Keras's own gives the step that memory."""
    compiled = model.jit_compile and not model.run_eagerly
    step = jax.jit(model.train_step) if compiled else model.train_step

    def train_function(state: Any, iterator: Any) -> Any:
        data = next(iterator)
        try:
            return jax.block_until_ready(step(state, data))
        except Exception:
            for variables, values in zip(_groups(model), state, strict=True):
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(value)
            model._jax_state = None
            raise

    model.train_function = train_function
    object.__setattr__(model, _UNDOABLE, train_function)


def raw(model: Any, variables: Sequence[Any], judged: Any) -> Any:
    if model.train_function is not getattr(model, _UNDOABLE):  # it was compiled anew
        return None
    state = getattr(model, "_jax_state", None)
    if not state or model._jax_state_synced:
        values = [variable.value for variable in variables]
    else:
        values = [*state["non_trainable_variables"], *state["metrics_variables"]]
    return [[np.asarray(value) for value in values], judged]


def _groups(model: Any) -> tuple[Sequence[Any], ...]:
    return (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )


def gradients(model: Any, inputs: Any, targets: Any, weights: Any) -> list[Array | None]:
    """Also updates the metrics."""
    others = model.non_trainable_variables
    state = [[v.value for v in part] for part in (model.trainable_variables, others, model.metrics_variables)]
    grads, (loss, outputs, changed, _) = jax.grad(model.compute_loss_and_updates, has_aux=True)(
        *state,
        inputs,
        targets,
        weights,
        training=True,
        optimizer_variables=[v.value for v in model.optimizer.variables],
    )
    for variable, value in zip(others, changed, strict=True):
        variable.assign(value)
    count(model, loss, row_count(inputs), inputs, targets, outputs, weights)
    return [np.asarray(grad) for grad in grads]


def called(model: Any, step: Any, data: Any) -> None:
    step(tuple([variable.value for variable in part] for part in _groups(model)), data)


def as_array(grad: Any) -> Any:
    return np.asarray(grad)


def apply(optimizer: Any, gradients: Sequence[Array], variables: Sequence[Any]) -> None:
    optimizer.apply([jnp.asarray(array) for array in gradients], variables)


def gather(ranks: RowGather, rows: Rows, exchange: Any) -> Any:
    """`all_gather` raises: `jit` would have to know the row counts of the other ranks."""

    def refuse(tensor: Any) -> Any:
        raise ConfigError(
            "all_gather: Keras on JAX compiles a step for a fixed number of rows, and the number on other "
            "workers differs from step to step.\nHint: keras_backend='torch' or 'tensorflow', or"
            " workers=1."
        )

    return refuse


def idle_step(step: Any, rows: Rows, model: Any, state: Any, data: Any) -> Any:
    """Without rows, computes on a zero row of no weight."""
    if rows.now:
        return step(state, data)
    zeros = jax.tree_util.tree_map(lambda part: jnp.zeros((1, *part.shape[1:]), part.dtype), data)
    logs, (trainable, _, optimizer, _) = step(state, zeros)
    return logs, (trainable, state[1], optimizer, state[3])


def after(grads: Sequence[Any]) -> AbstractContextManager[None]:
    return nullcontext()


def exchange(grads: list[Any], means: Means, rows: Rows) -> list[Any]:
    like = [jax.ShapeDtypeStruct(grad.shape, grad.dtype) for grad in grads]
    through = _through_buffers if jax.default_backend() == "cpu" else _through_copies
    return through(grads, like, means, rows)


def _through_buffers(dense: list[Any], like: list[Any], means: Means, rows: Rows) -> list[Any]:
    """Copies would be made by the thread pool that runs the callback: with one thread, it would deadlock."""
    weight = float(rows.now)

    def host(_: Any, outputs: Any, turn: Any, *inputs: Any) -> None:
        means_of_all = means([np.asarray(part) for part in inputs], weight)
        for output, mean in zip(outputs[1:], means_of_all, strict=True):
            np.copyto(np.asarray(output), mean)

    call = importlib.import_module("jax.experimental.buffer_callback").buffer_callback
    turn = rows.turn if rows.turn is not None else jnp.zeros((), jnp.float32)
    exchange = call(host, [jax.ShapeDtypeStruct((), jnp.float32), *like], has_side_effect=True)
    rows.turn, *shared = exchange(turn, *dense)
    return list(shared)


def _through_copies(dense: list[Any], like: list[Any], means: Means, rows: Rows) -> list[Any]:
    weight = float(rows.now)

    def host(*arrays: Any) -> list[Any]:
        return means([np.asarray(array) for array in arrays], weight)

    return list(importlib.import_module("jax.experimental").io_callback(host, like, *dense, ordered=True))


def row_count(data: Any) -> int:
    return int(jax.tree_util.tree_leaves(data)[0].shape[0])
