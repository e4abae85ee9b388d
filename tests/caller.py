"""Every public entry of an Estimator, and what its caller must find unchanged afterwards."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kindler import Estimator
from kindler.errors import ConfigError


def public_entries() -> set[str]:
    """Everything that users call on the class or an object of it."""
    return {name for name, _ in inspect.getmembers(Estimator) if not name.startswith("_")}


# tests/openvino; test_lightning.py, test_from_huggingface.py and test_lora.py of tests/torch;
# tests/spark/test_sql_function.py
ELSEWHERE = {
    "from_openvino",
    "from_lightning",
    "register_udf",
    "from_huggingface",
    "embed",
    "generate",
    "merge",
}

_PROPERTIES = ("config", "settings", "workers", "lineage", "statistics")


def entries(
    make: Callable[..., Estimator], data: Any, feature: Any, folder: Path, *, suffix: str
) -> dict[str, Callable[[], Any]]:
    """A call of every public entry, in an order that works."""
    est = make()
    saved, checkpoint = folder / f"model{suffix}", folder / "one.kindler"
    whole = folder / "whole.estimator"
    framework = "keras" if suffix == ".keras" else "torch"
    return {
        f"from_{framework}": make,
        "fit": lambda: est.fit(data, 1, 8, verbose=0, checkpoint=folder / "checkpoints"),
        "evaluate": lambda: est.evaluate(data, verbose=0),
        "predict": lambda: est.predict(feature),
        "copy": est.copy,
        "as_stage": lambda: est.as_stage(inputCol="x", labelCol="y"),
        "drift": lambda: est.drift(data),
        **{name: partial(getattr, est, name) for name in _PROPERTIES},
        "get_model": est.get_model,
        "from_framework": lambda: Estimator.from_framework(framework, model=est.get_model()),
        "signature": lambda: est.signature,
        "get_train_summary": est.get_train_summary,
        "get_validation_summary": lambda: est._summaries and None,
        "save": lambda: est.save(saved),
        "to_onnx": lambda: _to_onnx(est, folder / "net.onnx"),
        "to_openvino": lambda: est.to_openvino(folder / "net.xml"),
        "load_weights": lambda: make().load_weights(saved),
        "load": lambda: (est.save(whole), Estimator.load(whole, trusted=True)),
        "save_checkpoint": lambda: est.save_checkpoint(checkpoint),
        "load_checkpoint": lambda: make().load_checkpoint(checkpoint),
        "latest_checkpoint": lambda: Estimator.latest_checkpoint(folder / "checkpoints"),
    }


def _to_onnx(est: Estimator, path: Path) -> None:
    with contextlib.suppress(ConfigError):  # Keras 2 needs another package for it
        est.to_onnx(path)


def state_of_the_process() -> dict[str, Any]:
    """What a program would be surprised to find changed."""
    found: dict[str, Any] = {
        "random": random.getstate(),
        "numpy": tuple(map(str, (np.random.get_state()[1], np.random.get_state()[2:]))),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "sys.path": list(sys.path),
        "tempfile": tempfile.gettempdir(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.get_rng_state().tolist()
        found["threads"] = torch.get_num_threads()
        found["dtype"] = torch.get_default_dtype()
        found["gradients"] = torch.is_grad_enabled()
    if "tensorflow" in sys.modules:
        context = sys.modules["tensorflow.python.eager.context"].context()
        found["tensorflow"] = (context._seed, context._rng.getstate() if hasattr(context, "_rng") else None)
    return found


def changed_by(calls: Mapping[str, Callable[[], Any]]) -> dict[str, list[str]]:
    """For each call that changes something, what it changes."""
    changed = {}
    for name, call in calls.items():
        before = state_of_the_process()
        call()
        after = state_of_the_process()
        different = [key for key in before if before[key] != after[key]]
        if different:
            changed[name] = different
    return changed
