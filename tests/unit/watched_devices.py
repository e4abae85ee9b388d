"""Runs a warm process's preload in a fresh process, with the entry points of every GPU library watched.

The installed frameworks may be CPU builds; they are made to believe that they are not, so that they ask.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]

_PROGRAM = """
import importlib, json, sys

calls = []

def watch(module, name, answer=None, through=False):
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    known = getattr(owner, last, None)

    def watched(*args, **options):
        calls.append(f"{module}.{name}")
        return known(*args, **options) if through else answer

    setattr(owner, last, watched)

def watch_torch():
    import torch
    torch._C._has_cuda = True
    torch.cuda._is_compiled = lambda: True
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # imported by name in a CUDA build
    torch.cuda._device_count_nvml = lambda: -1  # as where there is no NVML
    watch("torch._C", "_cuda_getDeviceCount", 0)
    watch("torch._C", "_cuda_init")
    watch("torch.cuda", "_lazy_init")
    watch("torch.cuda", "device_count", 0)

def watch_tensorflow():
    import tensorflow
    context = "tensorflow.python.eager.context"
    watch(context, "Context.ensure_initialized", through=True)
    watch(context, "Context._initialize_physical_devices", through=True)

def watch_jax():
    import jax
    watch("jax._src.xla_bridge", "backends", through=True)
    watch("jax._src.xla_bridge", "_init_backend", through=True)

order = json.loads(sys.argv[1])
{"torch": watch_torch, "tensorflow": watch_tensorflow, "jax": watch_jax}[order["framework"]]()
from kindler.engine._fork_server_main import _preload
failure = _preload(order["preload"])
assert failure is None, failure
print("WATCHED" + json.dumps({"calls": calls, "then": order["then"] in sys.modules}))
"""


def preload_watched(
    framework: str,
    preload: Sequence[str],
    *,
    then: str = "",
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Which of the framework's entry points `preload` called, and whether the module `then` was imported."""
    order = {"framework": framework, "preload": list(preload), "then": then}
    places = [str(_ROOT / "src"), *([str(path)] if path else [])]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(order)],
        env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.rpartition("WATCHED")[2])
    return found
