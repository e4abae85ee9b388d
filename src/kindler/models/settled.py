"""Where a process of Keras or TensorFlow computes, which its backend is told before its first operation."""

from __future__ import annotations

from kindler.frameworks.keras import backends


def settled(backend: str, device: str) -> str:
    """Have the backend compute on the one GPU that this process sees, or on the CPU; returns which it is.

    Args:
        backend: What Keras computes with; "tensorflow" for all models of TensorFlow.
        device: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: "cuda" was asked for, and the backend finds no GPU.
    """
    backends.on(backend).configure(device=device, local_rank=0, threads=None)
    return "cuda" if backends.on(backend).on_gpu() else "cpu"
