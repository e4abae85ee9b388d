"""Chooses the Keras backend on the driver; imports it on a worker, with its share of the machine."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from kindler.errors import ConfigError, MissingExtraError
from kindler.frameworks.devices import is_installed

DEVICE_VARIABLE = "KERAS_TORCH_DEVICE"  # where Keras on PyTorch computes, if it is set
BACKENDS = ("tensorflow", "jax", "torch")

# What comes with the extras that make a backend compute on GPUs.
_GPU_PARTS = {
    "jax": ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin"),
    "tensorflow": ("nvidia",),
}


def flavour_of(model: Any) -> str | None:
    """Tells Keras 3 ("keras") from Keras 2 ("tf_keras"); None for anything that is not a Keras model."""
    for cls in type(model).__mro__:
        root = cls.__module__.partition(".")[0]
        if cls.__name__ == "Model" and root in ("keras", "tf_keras"):
            return root
    return None


def is_compiled(model: Any) -> bool:
    """Keras 2 records it under another name."""
    return bool(getattr(model, "compiled", None) or getattr(model, "_is_compiled", False))


def backend_of(model: Any, wanted: str | None) -> str:
    if wanted is not None and wanted not in BACKENDS:
        raise ConfigError(f"keras_backend={wanted!r}: must be one of {', '.join(BACKENDS)}.")
    if model is None:
        return wanted or _configured()
    made_with = "tensorflow" if flavour_of(model) == "tf_keras" else _imported() or _configured()
    if wanted not in (None, made_with):
        raise ConfigError(
            f"keras_backend={wanted!r}, but this model was created with Keras on {made_with}.\n"
            f"Hint: set KERAS_BACKEND={wanted} before Keras is imported, or pass a function that creates "
            "it instead of a model."
        )
    return made_with


def require(backend: str) -> None:
    for package in ("keras", backend):
        if not is_installed(package):
            extra = "keras" if package == "keras" and backend == "torch" else backend
            raise MissingExtraError(what=f"Keras on {backend}", package=package, extra=extra)


def environment(backend: str) -> tuple[tuple[str, str], ...]:
    legacy = os.environ.get("TF_USE_LEGACY_KERAS")
    return (
        ("KERAS_BACKEND", backend),
        ("TF_CPP_MIN_LOG_LEVEL", os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")),
        *((("TF_USE_LEGACY_KERAS", legacy),) if legacy else ()),
    )


def load(backend: str) -> Any:
    loaded = _imported()
    if loaded not in (None, backend):
        raise ConfigError(
            f"this process has imported Keras on {loaded}, and the model needs it on {backend}; a process "
            f"can "
            "have only one.\nHint: start a new session for it."
        )
    with _variable("KERAS_BACKEND", backend) if loaded is None else nullcontext():
        return importlib.import_module("keras")


def without_devices() -> AbstractContextManager[None]:
    """Keep Keras on PyTorch from touching a GPU during import; `configure` chooses the device later.

    CUDA does not work in forks of a process that has touched it. The other backends wait for their first use.
    """
    return _variable(DEVICE_VARIABLE, os.environ.get(DEVICE_VARIABLE) or "cpu")


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def on(backend: str) -> Any:
    """What this backend does in its own way; imports it."""
    return importlib.import_module(f"kindler.frameworks.keras.on_{backend}")


def may_use_gpus(backend: str) -> bool:
    """Whether the installed packages could use a GPU; touches no device and loads nothing."""
    if backend == "torch":
        from kindler.frameworks.torch.device import has_gpu_build

        return has_gpu_build()
    return is_installed(*_GPU_PARTS[backend])


def seed_everything(backend: str, seed: int, *, compiled: bool = True) -> None:
    seed %= 1 << 32
    load(backend)
    # Keras's own function would import TensorFlow wherever it is installed, which takes seconds.
    random.seed(seed)
    np.random.seed(seed)
    if backend != "jax":
        on(backend).seed(seed, compiled=compiled)
    store = importlib.import_module("keras.src.backend.common.global_state")
    store.set_global_attribute("global_random_seed", seed)
    store.set_global_attribute("global_seed_generator", None)


def drew_globally() -> bool:
    """Whether Keras's own generator was used, which layers without a seed of their own draw from."""
    store = importlib.import_module("keras.src.backend.common.global_state")
    return store.get_global_attribute("global_seed_generator") is not None


def _imported() -> str | None:
    keras = sys.modules.get("keras")
    return str(keras.backend.backend()) if keras is not None and hasattr(keras, "backend") else None


def _configured() -> str:
    """What `import keras` would choose: the environment, its file, or the first installed backend."""
    named = os.environ.get("KERAS_BACKEND") or _imported() or _from_file()
    if named in BACKENDS:
        return str(named)
    if named:
        raise ConfigError(f"Keras is set to the backend {named!r}; workers run {', '.join(BACKENDS)}.")
    return next((backend for backend in BACKENDS if is_installed(backend)), "tensorflow")


def _from_file() -> str | None:
    home = os.environ.get("KERAS_HOME") or Path.home() / ".keras"
    try:
        settings = json.loads((Path(home) / "keras.json").read_text())
    except (OSError, ValueError):
        return None
    found = settings.get("backend")
    return found if found in BACKENDS and is_installed(found) else None


def settled(backend: str, device: str) -> str:
    """Compute on the one GPU that this process sees, or on the CPU ("auto", "cpu", "cuda"); returns which."""
    on(backend).configure(device=device, local_rank=0, threads=None)
    return "cuda" if on(backend).on_gpu() else "cpu"
