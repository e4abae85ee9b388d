"""Warm processes import Keras and its backend, and ask for no device: their forks do."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from kindler.errors import ConfigError
from tests.keras.flavour import FLAVOUR
from tests.unit.watched_devices import preload_watched

BACKEND = "tensorflow" if FLAVOUR == "tf_keras" else FLAVOUR


@pytest.mark.skipif(FLAVOUR == "tf_keras", reason="what is imported for Keras on TensorFlow")
def test_preloading_keras_asks_for_no_device() -> None:
    asked = preload_watched(
        BACKEND,
        ["kindler.frameworks.keras.replica:preload"],
        then="keras",
        environment={"KERAS_BACKEND": BACKEND},
    )

    assert asked == {"calls": [], "then": True}


@pytest.mark.skipif(FLAVOUR != "torch", reason="the others choose on their first use")
@pytest.mark.parametrize(
    ("asked", "variable", "gpus", "expected"),
    [
        ("auto", None, 0, "cpu"),
        ("auto", None, 2, "cuda"),
        ("auto", "cpu", 2, "cpu"),
        ("cpu", None, 2, "cpu"),
        ("cuda", None, 2, "cuda"),
    ],
)
def test_a_worker_computes_on_the_device_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, variable: str | None, gpus: int, expected: str
) -> None:
    core, chosen = _watched_torch(monkeypatch, gpus)
    if variable is not None:
        monkeypatch.setenv("KERAS_TORCH_DEVICE", variable)

    _settle(asked)

    assert expected == core.DEFAULT_DEVICE
    assert chosen == (["cuda:1"] if expected == "cuda" else [])


@pytest.mark.skipif(FLAVOUR != "torch", reason="the others choose on their first use")
def test_a_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _watched_torch(monkeypatch, 0)

    with pytest.raises(ConfigError, match="'cuda' was requested; this machine has 0 CUDA devices"):
        _settle("cuda")


def _watched_torch(monkeypatch: pytest.MonkeyPatch, gpus: int) -> tuple[Any, list[str]]:
    torch = sys.modules["torch"]
    core = importlib.import_module("keras.src.backend.torch.core")
    chosen: list[str] = []
    monkeypatch.setattr(core, "DEFAULT_DEVICE", core.DEFAULT_DEVICE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    return core, chosen


def _settle(device: str) -> None:
    from kindler.frameworks.keras import on_torch

    on_torch.configure(device=device, local_rank=1, threads=None)
