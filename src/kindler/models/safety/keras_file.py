"""What a `.keras` file would make Keras do: a zip with a configuration, weights in HDF5, and assets.

The configuration names classes and functions. Only those in `keras_names.py` pass, and those that this
process has registered itself. Weights and vocabularies must lie in the file.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kindler.errors import ConfigError
from kindler.models.safety import hdf5_file
from kindler.models.safety.keras_names import CLASSES, FUNCTIONS, TENSORFLOW
from kindler.store.names import check_path

_CONFIG_BYTES = 64 << 20
# An entry may unpack to so many times the file's size, or to so many bytes.
_RATIO, _UNPACKED_BYTES = 200, 256 << 20
_ENTRIES = re.compile(r"config\.json|metadata\.json|model\.weights\.(h5|npz)|assets/.*")
# Layers, losses and the like. Not `utils`, `config` or `saving`, whose functions read files and switch checks
# off.
_PARTS = frozenset(
    {
        "activations",
        "applications",
        "constraints",
        "dtype_policies",
        "engine",
        "initializers",
        "layers",
        "losses",
        "metrics",
        "mixed_precision",
        "models",
        "ops",
        "optimizers",
        "quantizers",
        "random",
        "regularizers",
    }
)
_PLAIN = frozenset(
    {"__keras_tensor__", "__tensor__", "__numpy__", "__bytes__", "__ellipsis__", "__slice__", "__tuple__"}
)
_CALLS = frozenset({"TFOpLambda", "SlicingOpLambda"})
_RUNS_CODE = frozenset({"Lambda", "__lambda__", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer"})

IsRegistered = Callable[[str], bool]


def dangers(path: Path, *, is_registered: IsRegistered) -> list[str]:
    """What is in the file that could run code or read other files, in words; empty if nothing is."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
            _check_entries(archive, path)
            entry = archive.getinfo("config.json")
            if entry.file_size > _CONFIG_BYTES:
                raise ConfigError(f"{path.name}: its config.json is too large to be one.")
            config = json.loads(archive.read(entry))
            found = [problem for part in _walk(config) for problem in _problems(part, is_registered)]
            for entry in archive.infolist():
                if entry.filename.endswith(".h5"):
                    found += hdf5_file.dangers(_opened(archive, entry, raw))
    except ConfigError:
        raise
    except (zipfile.BadZipFile, KeyError, ValueError, OSError, RuntimeError, NotImplementedError) as exc:
        raise ConfigError(f"{path.name} is not a .keras file: {exc}.") from exc
    return list(dict.fromkeys(found))


def _check_entries(archive: zipfile.ZipFile, path: Path) -> None:
    names = [entry.filename for entry in archive.infolist()]
    if len(set(names)) != len(names):
        raise ConfigError(f"{path.name} is not a .keras file: it has two entries of one name.")
    size = path.stat().st_size
    for entry in archive.infolist():
        if not _ENTRIES.fullmatch(entry.filename):
            raise ConfigError(f"{path.name} is not a .keras file: it has an entry {entry.filename!r}.")
        check_path(entry.filename.rstrip("/"))
        if entry.file_size > max(_UNPACKED_BYTES, _RATIO * size):
            raise ConfigError(
                f"{path.name}: its entry {entry.filename!r} unpacks to {entry.file_size} bytes."
            )


def _opened(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, raw: BinaryIO) -> BinaryIO:
    """The entry as a file to seek in; without a copy if it is not packed."""
    if entry.compress_type != zipfile.ZIP_STORED:
        return io.BytesIO(archive.read(entry))
    raw.seek(entry.header_offset + 26)
    name, extra = struct.unpack("<HH", raw.read(4))
    return io.BufferedReader(_Window(raw, entry.header_offset + 30 + name + extra, entry.file_size))


class _Window(io.RawIOBase):
    """A part of a file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        self._file.seek(self._start + self._at)
        data = self._file.read(len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _walk(value: Any) -> Iterator[dict[str, Any]]:
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            yield one
            stack += one.values()
        elif isinstance(one, list):
            stack += one


def _problems(part: dict[str, Any], is_registered: IsRegistered) -> Iterator[str]:
    if "class_name" in part:
        yield from _named(part, is_registered)
    for key, value in part.items():
        if key == "vocabulary" and not _is_in_the_file(value):
            yield f"a vocabulary in the file {value!r}"
        elif isinstance(value, str) and (key == "fn" or key.endswith("activation")):
            known = value in FUNCTIONS or value in CLASSES or is_registered(value)
            yield from [] if known else [f"the function {value!r}, which is not known to be harmless"]


def _named(part: dict[str, Any], is_registered: IsRegistered) -> Iterator[str]:
    """What is wrong with a dict that stands for an object."""
    name, module, config = part["class_name"], part.get("module"), part.get("config")
    registered = part.get("registered_name")
    shown = f"{module}.{name}" if isinstance(module, str) else str(name)
    if not isinstance(name, str):
        yield f"the class {name!r}, which is not a name"
    elif _bare(name) in _RUNS_CODE:
        yield f"a {name} layer, which is code"
    elif any(isinstance(n, str) and is_registered(n) for n in (registered, name)):
        return
    elif name in _CALLS:
        function = config.get("function") if isinstance(config, dict) else None
        if function not in TENSORFLOW:
            yield f"a {name} of {function!r}, which is not known to be harmless"
    elif name == "function":
        names = [n for n in (config, registered) if n is not None and n != "function"]
        if not all(isinstance(n, str) and (n in FUNCTIONS or is_registered(n)) for n in names):
            yield f"the function {config!r} of {module}, which is neither known to be harmless nor registered"
        elif not _is_known(module):
            yield f"the function {shown} of a module that is not known"
    elif name not in _PLAIN:
        harmless = all(_bare(n) in CLASSES for n in (name, registered) if isinstance(n, str))
        if not harmless or not _is_known(module) or not isinstance(registered, str | None):
            yield f"{shown}, which is neither known to be harmless nor registered here"


def _bare(name: str) -> str:
    return name.rpartition(">")[2]


def _is_in_the_file(vocabulary: Any) -> bool:
    """Text would be the path of a file."""
    if isinstance(vocabulary, dict):
        return vocabulary.get("class_name") in ("__numpy__", "__tensor__")
    return vocabulary is None or isinstance(vocabulary, list)


def _is_known(module: Any) -> bool:
    if module in (None, "builtins"):
        return True
    root, *rest = str(module).split(".")
    inner = [part for part in rest if part not in ("src", "_tf_keras", "api")]
    if inner[:1] == ["backend"]:
        inner = inner[2:]  # a backend's own optimizers: backend.torch.optimizers.torch_adam
        return root == "keras" and inner[:1] == ["optimizers"]
    return root in ("keras", "tf_keras") and (not inner or inner[0] in _PARTS)
