"""The table of frameworks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path

import pytest

from kindler.errors import ConfigError, MissingExtraError
from kindler.frameworks.registry import FRAMEWORKS
from kindler.registry import Registry, Spec


def test_an_unknown_framework_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown framework 'trch'\. Did you mean 'torch'\?"):
        FRAMEWORKS.load("trch")


def test_a_name_near_to_none_is_answered_with_all_of_them() -> None:
    with pytest.raises(ConfigError, match=r"'caffe'\. There are: torch"):
        FRAMEWORKS.spec("caffe")


def test_a_row_loads_what_its_target_names() -> None:
    registry = Registry("thing", [Spec(name="ordered", target="collections:OrderedDict")])

    assert registry.load("ordered") is OrderedDict


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    row = Spec(name="absent", target="absent_package.part:Thing", package="absent_package", extra="gone")

    with pytest.raises(MissingExtraError, match=r"thing 'absent' needs 'absent_package'") as caught:
        Registry("thing", [row]).load("absent")
    assert "pip install 'kindler[gone]'" in str(caught.value)


def test_another_missing_module_is_not_blamed_on_the_package() -> None:
    row = Spec(name="broken", target="kindler.no_such_module:Thing", package="torch", extra="torch")

    with pytest.raises(ModuleNotFoundError, match=r"kindler\.no_such_module") as caught:
        Registry("thing", [row]).load("broken")
    assert not isinstance(caught.value, MissingExtraError)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution of somebody else's, with one good entry point and one that names no row."""
    (tmp_path / "thing_plugin.py").write_text(
        "from kindler.registry import Spec\n"
        "ROW = Spec(name='plugged', target='collections:OrderedDict')\n"
        "WRONG = 'no row'\n"
    )
    info = tmp_path / "thing_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kindler.things]\nplugged = thing_plugin:ROW\nwrong = thing_plugin:WRONG\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_an_entry_point_adds_a_row() -> None:
    registry = Registry("thing", [Spec(name="own", target="collections:Counter")], group="kindler.things")

    assert registry.load("plugged") is OrderedDict
    assert registry.names == ("own", "plugged", "wrong")


@pytest.mark.usefixtures("installed")
def test_an_entry_point_cannot_replace_a_built_in_row() -> None:
    registry = Registry("thing", [Spec(name="plugged", target="collections:Counter")], group="kindler.things")

    assert registry.load("plugged") is Counter


@pytest.mark.usefixtures("installed")
def test_an_entry_point_that_names_no_row_is_refused() -> None:
    registry: Registry[Spec] = Registry("thing", [], group="kindler.things")

    with pytest.raises(ConfigError, match=r"entry point 'wrong' of 'kindler\.things' names 'no row'"):
        registry.load("wrong")


@pytest.mark.usefixtures("installed")
def test_entry_points_are_among_the_names_of_a_complaint() -> None:
    registry: Registry[Spec] = Registry("thing", [], group="kindler.things")

    with pytest.raises(ConfigError, match=r"unknown thing 'pluged'\. Did you mean 'plugged'\?"):
        registry.load("pluged")


def _env() -> dict[str, str]:
    """A fresh process finds what this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_importing_the_table_loads_no_framework() -> None:
    code = (
        "import sys, kindler.frameworks.registry, kindler.frameworks.contract, kindler.frameworks.creators;"
        "sys.exit(' '.join(m for m in ('torch', 'tensorflow', 'jax', 'pyspark') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=_env()
    )

    assert done.stderr.strip() == ""
