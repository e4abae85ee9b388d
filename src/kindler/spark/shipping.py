"""Packs the environment of this process as an archive that Spark unpacks on executors. A virtual
environment also needs the Python it was made from, at the same path on every machine; a conda
environment, packed by conda-pack, needs nothing else. Archives are cached until the environment
changes."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError, MissingExtraError
from kindler.temporary import beside

PYTHON = "./environment/bin/python"
"""The Python of a shipped environment, as executors see it."""

_NAME = "environment"
_KEPT = 2
# Spark has its own jars on the executors; other Sparks and compiled modules are only weight.
_LEFT_OUT_FOLDERS = {"pip", "setuptools", "wheel"}
_LEFT_OUT_PARTS = ("pyspark/jars", "pyspark/examples", "pyspark/data")


def ship_settings(ship: str, wanted: Mapping[str, str]) -> dict[str, str]:
    if ship != "venv":
        raise ConfigError(f'init(ship={ship!r}): must be "venv", or None to ship nothing.')
    master = wanted.get("spark.master", wanted.get("spark.remote"))
    if master is None or master.startswith("local"):
        raise ConfigError(
            f"init(master={master!r}, ship={ship!r}): on this machine Spark uses this very environment.\n"
            "Hint: leave out ship, or name the cluster: init('spark://host:7077', ship='venv')."
        )
    if master.startswith("sc://"):
        raise ConfigError(
            f"init(master={master!r}, ship={ship!r}): the Python of a Spark Connect server's executors is set"
            " where the server is started.\nHint: leave out ship."
        )
    others = [wanted["spark.archives"]] if wanted.get("spark.archives") else []
    return {"spark.archives": ",".join([*others, f"{packed_environment()}#{_NAME}"])}


def is_shipped(settings: Mapping[str, str]) -> bool:
    return settings.get("spark.archives", "").endswith(f"#{_NAME}")


def packed_environment(prefix: Path | None = None, cache: Path | None = None) -> Path:
    if prefix is None and sys.prefix == sys.base_prefix and not _is_conda(Path(sys.prefix)):
        raise ConfigError(
            f"init(ship='venv'): {sys.executable} is not in a virtual environment.\n"
            "Hint: make one with `python -m venv`, install what you need in it, and run this program in it."
        )
    prefix = Path(sys.prefix) if prefix is None else prefix
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = cache or Path(base, "kindler", "environments")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / f"{_NAME}-{_state(prefix)}.tar.gz"
    if not target.exists():
        with beside(target) as unfinished:
            if _is_conda(prefix):
                _pack_conda(prefix, unfinished)
            else:
                with tarfile.open(unfinished, "w:gz", compresslevel=1) as archive:
                    for path, name in _files(prefix):
                        archive.add(path, name, recursive=False)
    with contextlib.suppress(OSError):
        target.touch()
        archives = sorted(folder.glob(f"{_NAME}-*.tar.gz"), key=lambda path: -path.stat().st_mtime)
        for old in archives[_KEPT:]:  # running applications got their archive when they started
            old.unlink(missing_ok=True)
    return target


def _files(prefix: Path) -> Iterator[tuple[Path, str]]:
    site = next(prefix.glob("lib/python3.*/site-packages"), None)
    if site is None or not (prefix / "pyvenv.cfg").exists():
        raise ConfigError(f"init(ship='venv'): {prefix} is not a virtual environment.")
    yield prefix / "pyvenv.cfg", "pyvenv.cfg"
    for path in sorted((prefix / "bin").glob("python*")):
        yield path, f"bin/{path.name}"
    if (prefix / "lib64").is_symlink():
        yield prefix / "lib64", "lib64"
    inside = site.relative_to(prefix).as_posix()
    yield from _below(site, inside)
    for source in _elsewhere(site, prefix):
        # Packages that are installed by reference, as `pip install -e` does: their files travel, too.
        for package in sorted(source.iterdir()):
            if (package / "__init__.py").exists():
                yield from _below(package, f"{inside}/{package.name}")
            elif package.suffix == ".py":
                yield package, f"{inside}/{package.name}"


def _below(folder: Path, name: str) -> Iterator[tuple[Path, str]]:
    for place, folders, files in os.walk(folder):
        relative = Path(place).relative_to(folder).as_posix()
        at = name if relative == "." else f"{name}/{relative}"
        top = relative == "."
        folders[:] = sorted(
            one
            for one in folders
            if one != "__pycache__"
            and not (top and one in _LEFT_OUT_FOLDERS)
            and not f"{at}/{one}".endswith(_LEFT_OUT_PARTS)
        )
        for file in sorted(files):
            if not (top and file.endswith(".pth") and _paths(Path(place, file))):
                yield Path(place, file), f"{at}/{file}"


def _elsewhere(site: Path, prefix: Path) -> list[Path]:
    """Folders outside the environment that its .pth files put on the path."""
    paths = [path for file in sorted(site.glob("*.pth")) for path in _paths(file)]
    return [path for path in dict.fromkeys(paths) if prefix not in path.parents]


def _paths(file: Path) -> list[Path]:
    lines = file.read_text(errors="replace").splitlines()
    return [Path(line) for line in lines if line.startswith("/") and Path(line).is_dir()]


def _pack_conda(prefix: Path, target: Path) -> None:
    try:
        conda_pack: Any = importlib.import_module("conda_pack")
    except ModuleNotFoundError as exc:
        if exc.name != "conda_pack":
            raise
        raise MissingExtraError(
            what="init(ship='venv') of a conda environment", package="conda-pack", extra="ship"
        ) from exc
    conda_pack.pack(prefix=str(prefix), output=str(target), force=True, ignore_editable_packages=False)


def _is_conda(prefix: Path) -> bool:
    return (prefix / "conda-meta").is_dir()


def _state(prefix: Path) -> str:
    """Changes when packages are installed, removed or, if editable, edited."""
    digest = hashlib.sha256(f"1:{prefix}:{sys.version}".encode())
    for site in sorted(prefix.glob("lib/python3.*/site-packages")):
        for path in [*sorted(site.iterdir()), *sorted(site.glob("*.dist-info/RECORD"))]:
            status = path.lstat()
            digest.update(f"{path.name}:{status.st_mtime_ns}:{status.st_size}\n".encode())
        for source in _elsewhere(site, prefix):
            for path, name in _below(source, "s"):
                status = path.lstat()
                digest.update(f"{name}:{status.st_mtime_ns}:{status.st_size}\n".encode())
    return digest.hexdigest()[:16]
