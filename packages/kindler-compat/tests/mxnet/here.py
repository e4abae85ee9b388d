"""Whether MXNet runs on this machine: its wheel for ARM processors needs libraries that pip does not have."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

__all__ = ["WHY_NOT"]

_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1] + '/libmxnet.so')"


def _why_not() -> str | None:
    found = importlib.util.find_spec("mxnet")
    if found is None or not found.submodule_search_locations:
        return "MXNet is not installed"
    command = [sys.executable, "-c", _LOAD, found.submodule_search_locations[0]]
    loaded = subprocess.run(command, capture_output=True, text=True)
    return None if loaded.returncode == 0 else f"MXNet cannot be loaded: {loaded.stderr.splitlines()[-1]}"


WHY_NOT = _why_not()
