"""What a `.keras` file would make Keras do: a zip with a configuration, weights in HDF5, and assets.

The configuration names classes and functions. Only those in `allowed_names.ini` pass, and those that this
process has registered itself. Weights and vocabularies must lie in the file.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kindler.errors import ConfigError
from kindler.models.safety import allowed_names, objects_in
from kindler.store.names import check_path

_CLASSES = allowed_names("keras classes") | allowed_names("keras operations")
_FUNCTIONS = allowed_names("keras functions")
_TF_SYMBOLS = allowed_names("keras tensorflow symbols")
_CONFIG_BYTES = 64 << 20
# An entry may unpack to so many times the file's size, or to so many bytes.
_RATIO, _UNPACKED_BYTES = 200, 256 << 20
_ENTRIES = re.compile(r"config\.json|metadata\.json|model\.weights\.(h5|npz)|assets/.*")
# Layers, losses and the like. Not `utils`, `config` or `saving`, whose functions read files and switch checks
# off.
_PARTS = (
    *("activations", "applications", "constraints", "dtype_policies", "engine", "initializers", "layers"),
    *("losses", "metrics", "mixed_precision", "models", "ops", "optimizers", "quantizers", "random"),
    "regularizers",
)
_PLAIN = frozenset(
    {"__keras_tensor__", "__tensor__", "__numpy__", "__bytes__", "__ellipsis__", "__slice__", "__tuple__"}
)
_CALLS = frozenset({"TFOpLambda", "SlicingOpLambda"})
_RUNS_CODE = frozenset({"Lambda", "__lambda__", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer"})

# The filters that come with HDF5 and h5py; any other is a library that HDF5 looks for and loads.
_FILTERS = frozenset({1, 2, 3, 4, 5, 6, 32000})
# What can at most be packed into a byte, and how large a dataset may be that is not stored at all.
_WEIGHTS_RATIO, _UNSTORED_BYTES = 1100, 1 << 20

IsRegistered = Callable[[str], bool]


def dangers(path: Path, *, is_registered: IsRegistered) -> list[str]:
    """What is in the file that could run code or read other files, in words; empty if nothing is."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
            _check_entries(archive, path)
            entry = archive.getinfo("config.json")
            if entry.file_size > _CONFIG_BYTES:
                raise ConfigError(f"{path.name}: its config.json is too large.")
            config = json.loads(archive.read(entry))
            found = [problem for part in objects_in(config) for problem in _problems(part, is_registered)]
            for entry in archive.infolist():
                if entry.filename.endswith(".h5"):
                    found += _hdf5_dangers(_opened(archive, entry, raw))
    except ConfigError:
        raise
    except (zipfile.BadZipFile, KeyError, ValueError, OSError, RuntimeError, NotImplementedError) as exc:
        raise ConfigError(f"{path.name} is not a .keras file: {exc}.") from exc
    return list(dict.fromkeys(found))


def _check_entries(archive: zipfile.ZipFile, path: Path) -> None:
    names = [entry.filename for entry in archive.infolist()]
    if len(set(names)) != len(names):
        raise ConfigError(f"{path.name} is not a .keras file: it has two entries with the same name.")
    size = path.stat().st_size
    for entry in archive.infolist():
        if not _ENTRIES.fullmatch(entry.filename):
            raise ConfigError(
                f"{path.name} is not a .keras file: it has an unexpected entry {entry.filename!r}."
            )
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


def _problems(part: dict[str, Any], is_registered: IsRegistered) -> Iterator[str]:
    if "class_name" in part:
        yield from _named(part, is_registered)
    for key, value in part.items():
        if key == "vocabulary" and not _is_in_the_file(value):
            yield f"a vocabulary in the file {value!r}"
        elif isinstance(value, str) and (key == "fn" or key.endswith("activation")):
            known = value in _FUNCTIONS or value in _CLASSES or is_registered(value)
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
        if function not in _TF_SYMBOLS:
            yield f"a {name} of {function!r}, which is not known to be harmless"
    elif name == "function":
        names = [n for n in (config, registered) if n is not None and n != "function"]
        if not all(isinstance(n, str) and (n in _FUNCTIONS or is_registered(n)) for n in names):
            yield f"the function {config!r} of {module}, which is neither known to be harmless nor registered"
        elif not _is_known(module):
            yield f"the function {shown} of an unknown module"
    elif name not in _PLAIN:
        harmless = all(_bare(n) in _CLASSES for n in (name, registered) if isinstance(n, str))
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


def _hdf5_dangers(file: BinaryIO) -> list[str]:
    """What leads out of a file of weights: its links and datasets can name other files, which HDF5 reads."""
    h5py: Any = importlib.import_module("h5py")
    with h5py.File(file, "r") as opened:
        return list(dict.fromkeys(_group(h5py, opened)))


def _group(h5py: Any, root: Any) -> Iterator[str]:
    waiting, seen = [root], set()
    while waiting:
        group = waiting.pop()
        for name in group:
            if not _is_own(h5py, group, name):
                yield f"the weights {name!r}, which are a link"
                continue
            found = group[name]
            place = h5py.h5o.get_info(found.id).addr
            if place in seen:
                continue
            seen.add(place)
            if isinstance(found, h5py.Group):
                waiting.append(found)
            elif isinstance(found, h5py.Dataset):
                yield from _dataset(name, found)


def _is_own(h5py: Any, group: Any, name: str) -> bool:
    try:
        return isinstance(group.get(name, getlink=True), h5py.HardLink)
    except TypeError:  # of h5py: a link of a kind that somebody has defined
        return False


def _dataset(name: str, dataset: Any) -> Iterator[str]:
    how = dataset.id.get_create_plist()
    if dataset.external or dataset.is_virtual:
        yield f"the weights {name!r}, which are in other files"
    elif any(how.get_filter(i)[0] not in _FILTERS for i in range(how.get_nfilters())):
        yield f"the weights {name!r}, which are packed in an unknown way"
    elif dataset.nbytes > max(_UNSTORED_BYTES, _WEIGHTS_RATIO * dataset.id.get_storage_size()):
        yield f"the weights {name!r}, which are larger than what is stored of them"
