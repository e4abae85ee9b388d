"""What a `.keras` file would make Keras do: a zip whose config.json names classes, functions and modules."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError

__all__ = ["dangers"]

_CONFIG_BYTES = 64 << 20
# Layers, losses and the like. Not `utils`, `config` or `saving`, whose functions read files and switch checks
# off.
_PARTS = frozenset(
    {
        "activations",
        "backend",
        "constraints",
        "distribution",
        "dtype_policies",
        "engine",
        "initializers",
        "layers",
        "legacy",
        "losses",
        "metrics",
        "models",
        "ops",
        "optimizers",
        "quantizers",
        "random",
        "regularizers",
    }
)
_RUNS_CODE = frozenset({"Lambda", "__lambda__", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer"})


def dangers(path: Path, *, is_registered: Callable[[str], bool]) -> list[str]:
    """What is in the file that could run code, in words; empty if nothing is.

    Args:
        path: The file.
        is_registered: Whether this process knows a custom class by that name.

    Raises:
        ConfigError: It is no `.keras` file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo("config.json")
            if entry.file_size > _CONFIG_BYTES:
                raise ConfigError(f"{path.name}: its config.json is too large to be one.")
            config = json.loads(archive.read(entry))
    except (zipfile.BadZipFile, KeyError, ValueError) as exc:
        if isinstance(exc, ConfigError):
            raise
        raise ConfigError(f"{path.name} is no .keras file: {exc}.") from exc
    found = [problem for part in _walk(config) for problem in _problems(part, is_registered)]
    return list(dict.fromkeys(found))


def _walk(value: Any) -> Iterator[dict[str, Any]]:
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            yield one
            stack += one.values()
        elif isinstance(one, list):
            stack += one


def _problems(part: dict[str, Any], is_registered: Callable[[str], bool]) -> Iterator[str]:
    name, module = part.get("class_name"), part.get("module")
    if isinstance(name, str) and name.rpartition(">")[2] in _RUNS_CODE:
        yield f"a {name} layer, which is code"
    elif isinstance(name, str) and isinstance(module, str) and not _is_known(module):
        registered = part.get("registered_name")
        if not any(isinstance(n, str) and is_registered(n) for n in (registered, name)):
            yield f"{module}.{name}, which is not Keras's own and not registered here"


def _is_known(module: str) -> bool:
    if module == "builtins":
        return True
    root, *rest = module.split(".")
    inner = [part for part in rest if part not in ("src", "_tf_keras", "api")]
    return root in ("keras", "tf_keras") and (not inner or inner[0] in _PARTS)
