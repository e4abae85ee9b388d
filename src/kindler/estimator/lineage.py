"""What made a model: a record of each fit as JSON, and the recipe that makes the same model again.

The record is read without trust and runs nothing. The recipe is an estimator as it was before the fit, with
the options of the fit: it holds code, and is read by those who trust it.
"""

from __future__ import annotations

import getpass
import hashlib
import inspect
import math
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime, timezone
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kindler.data.paths import file_system, is_remote
from kindler.data.preparation import Prepare
from kindler.data.sources import ParquetSource
from kindler.estimator.inputs.contract import Input
from kindler.frameworks.creators import title
from kindler.train.callbacks import Plain
from kindler.train.metric_names import BOOKKEEPING
from kindler.train.options import FitOptions, PredictOptions, RunConfig

if TYPE_CHECKING:
    from kindler.estimator.model import FrameworkModel

FIT = "fit.pickle"  # the options, in a recipe
RECIPE_BYTES = 64 << 20  # what a fit began from, above which it is not kept

_WHOLE_BYTES = 256 << 20  # of all files together; of the others the ends are hashed
_END_BYTES = 64 << 10
_FILES = 1000  # listed one by one
_TEXT = 20_000  # characters of one function's source, or of a plan
_FORMAT = 1
_GIT_S = 5.0
_OF_COLUMNS = ("feature_cols", "label_cols", "weight_col", "shapes", "dtypes", "stack_features", "allow_nan")
_OF_OPTIONS = (
    *("batch_size", "epochs", "max_steps", "shuffle", "steps_per_epoch", "initial_epoch"),
    *("class_weight", "nan_loss", "ingest"),
)
_OF_SCORING = ("batch_size", "output_cols", "accelerator", "precision", "on_error")
_PACKAGES = (
    *("kindler", "numpy", "pandas", "pyarrow", "pyspark"),
    *("torch", "lightning", "transformers", "keras", "tf_keras", "tensorflow", "jax"),
)
_SECRET = re.compile(r"passw|secret|token|credential|api_?key|access_?key|private", re.IGNORECASE)
_URI_USER = re.compile(r"(\w+://)[^/@\s]+@")
_URI_OPTIONS = re.compile(r"(\w+://[^?\s]+)\?\S+")


@dataclass(frozen=True)
class Lineage:
    """What made the weights of an estimator.

    Attributes:
        fits: The records of all fits that the weights come from, oldest first, as JSON.
        recipe: The file that repeats the last of them; empty if that was too large to keep.
        version: The stored version that has these weights: its name, bucket and digest.
    """

    fits: Sequence[Mapping[str, Any]] = ()
    recipe: bytes = field(default=b"", repr=False)
    version: Mapping[str, Any] = field(default_factory=dict)


def described(item: Input, source: Any) -> dict[str, Any]:
    """The data of a run as JSON; `source` is what the workers read."""
    facts: dict[str, Any] = {"kind": item.name, **item.describe()}
    direct = isinstance(source, ParquetSource)
    paths = facts.get("paths") or ()
    if direct:  # files of a table never change
        paths = [file for place, file in enumerate(source.files.files) if source.files.view(place) is None]
    facts |= {"direct": direct} | files_record(paths)
    facts["validation_split"] = item.held_out
    return cleaned(_without_nothing(facts))  # type: ignore[no-any-return]


def files_record(paths: Sequence[str]) -> dict[str, Any]:
    """Files with sizes and hashes: of their content, or of both ends where there is too much of it."""
    left, records = _WHOLE_BYTES, []
    for path in paths[:_FILES]:
        record = _file_record(path, left)
        left -= record.get("size", 0) if record.get("hashed") == "all" else 0
        records.append(record)
    return {"file_count": len(paths), "files": records}


def _file_record(path: str, most: int) -> dict[str, Any]:
    system, place = file_system(path)
    try:
        info = system.get_file_info(place)
        size, changed = int(info.size or 0), info.mtime
        whole = size <= most and not is_remote(path)
        digest = hashlib.sha256()
        with system.open_input_file(place) as file:
            whole = whole or size <= 2 * _END_BYTES
            parts = [(0, size)] if whole else [(0, _END_BYTES), (size - _END_BYTES, _END_BYTES)]
            for start, length in parts:
                file.seek(start)
                while length > 0 and (piece := file.read(min(length, 1 << 20))):
                    digest.update(piece)
                    length -= len(piece)
    except OSError:  # only the executors see it
        return {"path": path}
    return {
        "path": path,
        "size": size,
        "modified": None if changed is None else changed.astimezone(timezone.utc).isoformat(),
        "sha256": digest.hexdigest(),
        "hashed": "all" if whole else "ends",
    }


def record(
    model: FrameworkModel,
    options: FitOptions,
    config: RunConfig,
    made: Mapping[str, Any],
    metrics: Mapping[str, Any],
    *,
    began: str,
    start: str,
    parent: Mapping[str, Any],
    functions: Mapping[str, Any],
) -> dict[str, Any]:
    """One fit as JSON. `made` is what the run said of itself, `functions` are those besides the model's."""
    members = _members(model.spec)
    callbacks = {f"callback {place}": one for place, one in enumerate(options.callbacks, start=1)}
    code = _codes({**members, **functions, **callbacks})
    user_config = members.get("config") or {}
    record = {
        "format": _FORMAT,
        "user": _user(),
        "began": began,
        "ended": utc_now(),
        "start": start,
        "parent": parent,
        "framework": model.framework,
        "seed": config.seed,
        "strategy": {"name": options.strategy.name, **options.strategy.options},
        "columns": {name: getattr(options.columns, name) for name in _OF_COLUMNS},
        "options": {name: getattr(options, name) for name in _OF_OPTIONS},
        "config": {name: value for name, value in user_config.items() if isinstance(value, Plain)},
        **made,
        "code": code,
        "packages": dict(_packages()),
        "machine": {"system": platform.platform(), "processor": _processor()},
        "metrics": {name: value for name, value in metrics.items() if name not in BOOKKEEPING},
    }
    return cleaned(_without_nothing(record))  # type: ignore[no-any-return]


def scoring_record(
    model: FrameworkModel, weights: Mapping[str, str], options: PredictOptions
) -> dict[str, Any]:
    """What outputs depend on besides the rows, as JSON: the same for the same model in another process."""
    prepare = options.preparation or Prepare()
    functions = {**prepare.functions, **({} if options.finish is None else {"finish": options.finish})}
    digest = hashlib.sha256("".join(f"{name}={weights[name]};" for name in sorted(weights)).encode())
    record = {
        "model": {
            "framework": model.framework,
            "weights": digest.hexdigest(),
            "code": {
                f"{one['role']}: {one['name']}": one.get("sha256")
                for one in _codes({**_members(model.spec), **prepare.functions})
            },
        },
        "options": {
            **{name: getattr(options, name) for name in _OF_SCORING},
            "columns": {name: getattr(options.columns, name) for name in _OF_COLUMNS},
            "prepare": {name: getattr(prepare, name) for name in ("pad", "pad_value", "masks", "text")},
            **{name: _arguments(function) for name, function in functions.items()},
        },
    }
    return cleaned(_without_nothing(record))  # type: ignore[no-any-return]


def _arguments(function: Any) -> dict[str, Any]:
    """What a function of Kindler's was made with."""
    found: dict[str, Any] = {}
    while isinstance(function, partial):
        named = dict(enumerate(function.args)) | function.keywords
        found |= {str(name): value for name, value in named.items()}
        function = function.func
    own = getattr(getattr(function, "__self__", function), "described", None)
    return {**(own() if callable(own) else {}), **found}


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def cleaned(value: Any, name: str = "") -> Any:
    """As JSON, without credentials: users and options of URLs, and values under names such as `api_key`."""
    if name and _SECRET.search(name) and not (value is None or (isinstance(value, str) and not value)):
        return "***"
    if isinstance(value, Mapping):
        return {str(key): cleaned(part, str(key)) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [cleaned(part) for part in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return _URI_OPTIONS.sub(r"\1", _URI_USER.sub(r"\1", str(value)))


def _without_nothing(record: Mapping[str, Any]) -> dict[str, Any]:
    filled = {
        name: _without_nothing(part) if isinstance(part, Mapping) else part for name, part in record.items()
    }
    return {
        name: part
        for name, part in filled.items()
        if part is not None and not (isinstance(part, dict | list) and not part)
    }


def _members(spec: Any) -> dict[str, Any]:
    if isinstance(spec, Mapping):
        return dict(spec)
    return {f.name: getattr(spec, f.name) for f in fields(spec)} if is_dataclass(spec) else {}


def _codes(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [entry for name, part in parts.items() if (entry := _code(name, part)) is not None]


def _code(role: str, part: Any) -> dict[str, Any] | None:
    """The user's own function or class behind a part of the recipe; None for those of packages."""
    while isinstance(part, partial):
        part = part.func
    part = getattr(part, "function", part)  # of `batched`
    if not inspect.isroutine(part) and not inspect.isclass(part):
        part = type(part)
    module = sys.modules.get(getattr(part, "__module__", None) or "")
    if module is None or module.__name__ == "builtins" or installed(module):
        return None
    found: dict[str, Any] = {"role": role, "name": f"{module.__name__}.{title(part).removesuffix('()')}"}
    try:
        file, source = inspect.getsourcefile(part), inspect.getsource(part)
    except (OSError, TypeError):  # of a console
        return found
    found["sha256"] = hashlib.sha256(source.encode()).hexdigest()
    found["source"] = source[:_TEXT]
    return found | {"file": file} | _commit(file)


def installed(module: Any) -> bool:
    """Whether a module is part of Python, of a package that was installed, or of Kindler."""
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__":
        return False
    if file is None or module.__name__.partition(".")[0] == "kindler":
        return True
    folders = {sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")}
    return any(Path(file).is_relative_to(folder) for folder in folders)


def _commit(file: str | None) -> dict[str, Any]:
    """The commit that a file is from, and whether the file differs from it; empty without git."""
    folder = Path(file or "").absolute().parent
    if file is None or not any((above / ".git").exists() for above in (folder, *folder.parents)):
        return {}
    asked = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch", "--", str(file)]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.splitlines()
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid")]
    changed = any(not line.startswith("#") for line in lines)
    return {"commit": commits[0], "changed": changed} if commits and commits[0] != "(initial)" else {}


@cache  # each is a file to parse, and the processes of this program have imported what is installed now
def _packages() -> Mapping[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may have no name for its user
        return None
