"""The archive of an environment that executors unpack."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from kindler.errors import ConfigError
from kindler.spark.shipping import is_shipped, packed_environment, ship_settings


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment with a package, one that is installed by reference, and much that is not needed."""
    prefix = tmp_path / "venv"
    site = prefix / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    for folder in (site / "tool" / "__pycache__", site / "pyspark" / "jars", site / "pip", prefix / "bin"):
        folder.mkdir(parents=True)
    (prefix / "pyvenv.cfg").write_text(f"home = {os.path.dirname(sys._base_executable)}\n")  # type: ignore[attr-defined]
    (prefix / "bin" / "python").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
    (site / "tool" / "__init__.py").write_text("from mine import answer\n")
    (site / "tool" / "__pycache__" / "x.pyc").touch()
    (site / "pyspark" / "__init__.py").touch()
    (site / "pyspark" / "jars" / "spark.jar").touch()
    (site / "pip" / "__init__.py").touch()
    source = tmp_path / "source"
    (source / "mine").mkdir(parents=True)
    (source / "mine" / "__init__.py").write_text("answer = 42\n")
    (source / "notes.txt").touch()
    (site / "_mine.pth").write_text(f"{source}\n")
    return prefix


def test_an_unpacked_environment_runs_in_another_place_with_packages_installed_by_reference(
    environment: Path, tmp_path: Path
) -> None:
    archive = packed_environment(environment, tmp_path / "cache")
    place = tmp_path / "executor" / "environment"
    with tarfile.open(archive) as packed:
        names = packed.getnames()
        packed.extractall(place, filter="fully_trusted")
    os.rename(environment.parent / "source", tmp_path / "gone")

    done = subprocess.run(
        [place / "bin" / "python", "-I", "-c", "import sys, tool; print(tool.answer, sys.prefix)"],
        capture_output=True,
        text=True,
    )

    assert done.stdout.split() == ["42", str(place)], done.stderr
    assert not [name for name in names if "jars" in name or "pycache" in name or "/pip/" in name]


def test_the_archive_is_made_again_only_when_the_environment_has_changed(
    environment: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first = packed_environment(environment, cache)
    written = first.stat().st_ino
    assert packed_environment(environment, cache) == first
    assert first.stat().st_ino == written

    (environment.parent / "source" / "mine" / "more.py").touch()
    changed = packed_environment(environment, cache)
    (environment.parent / "source" / "mine" / "most.py").touch()
    newest = packed_environment(environment, cache)

    assert len({first, changed, newest}) == 3
    assert sorted(cache.iterdir()) == sorted([changed, newest])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"master": "local[2]", "ship": "venv"}, "this very environment"),
        ({"ship": "venv"}, "this very environment"),
        ({"master": "sc://host:15002", "ship": "venv"}, "where the server is started"),
        ({"master": "spark://host:7077", "ship": "conda"}, 'must be "venv"'),
    ],
)
def test_what_cannot_be_shipped_is_refused(arguments: dict[str, str], complaint: str) -> None:
    settings = {"spark.master": arguments["master"]} if "master" in arguments else {}
    with pytest.raises(ConfigError, match=complaint):
        ship_settings(arguments["ship"], settings)


def test_a_folder_that_is_no_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a virtual environment"):
        packed_environment(tmp_path, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_archives_of_the_user_are_shipped_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kindler.spark.shipping.packed_environment", lambda: tmp_path / "e.tar.gz")

    settings = ship_settings("venv", {"spark.master": "yarn", "spark.archives": "mine.zip#mine"})

    assert settings == {"spark.archives": f"mine.zip#mine,{tmp_path}/e.tar.gz#environment"}
    assert is_shipped(settings)
