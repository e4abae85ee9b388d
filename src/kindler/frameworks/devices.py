"""GPU errors and messages shared by all frameworks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

from kindler.errors import ConfigError

_HINTS = {
    ("out of memory", "RESOURCE_EXHAUSTED", "ResourceExhausted"): (
        "Hint: a smaller batch_size; for PyTorch also Optimization(accumulation_steps=2) or more, and"
        " Device(precision='bf16') or Device(cache=False), which keeps the rows in the machine's memory."
    ),
    ("device-side assert",): (
        "Hint: most often a label or an index is out of range: the labels of N classes are 0 to N - 1, those"
        " of an embedding 0 to num_embeddings - 1. With device='cpu' the error names the operation."
    ),
}


@contextmanager
def explained() -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        message = f"{type(exc).__name__} {exc}"
        on_gpu = "CUDA" in message or "RESOURCE_EXHAUSTED" in message or "ResourceExhausted" in message
        for words, hint in _HINTS.items():
            if on_gpu and any(word in message for word in words):
                exc.args = (f"{exc}\n{hint}", *exc.args[1:])
        raise


def is_installed(*packages: str) -> bool:
    return any(importlib.util.find_spec(name) is not None for name in packages)


def missing_gpu(device: str, library: str, install: str) -> ConfigError:
    return ConfigError(
        f"device {device!r} was requested; {library} finds no GPU here.\n"
        f"Hint: pip install '{install}' installs what it needs in addition to the driver."
    )


@contextmanager
def quiet_without_gpu() -> Iterator[None]:
    """TensorFlow's native code reports a missing driver there, whatever Python's settings say."""
    if os.path.exists("/dev/nvidiactl"):
        yield
        return
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
