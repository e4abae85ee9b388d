"""A model kind of another package, found by its entry point: stored, run and served as Kindler's own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kindler import Store
from kindler.errors import ConfigError, UntrustedError
from kindler.models.loaded import load
from kindler.models.registry import MODEL_KINDS
from kindler.testing.models import ModelKindContract
from tests.serve.served import ROOT, command, serving

PLUGINS = ROOT / "tests" / "plugins"
X = np.random.default_rng(0).normal(size=(4, 2))
EXPECTED = X[:, 0] + 2 * X[:, 1]


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The other package is installed: its folder with a dist-info is on the path, here and in processes."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGINS), str(ROOT / "src")]))
    yield
    sys.modules.pop("toy_models", None)


@pytest.fixture
def weighted() -> Any:
    return importlib.import_module("toy_models").WeightedSum([1, 2])


class TestToy(ModelKindContract):
    kind = "toy"

    @pytest.fixture
    def model(self, weighted: Any) -> Any:
        return weighted

    @pytest.fixture
    def rows(self) -> Any:
        return X

    @pytest.fixture
    def expected(self) -> Any:
        return EXPECTED


def test_it_is_stored_run_and_served(tmp_path: Path, weighted: Any) -> None:
    om = Store(tmp_path / "store")
    om.models.put(weighted, "net")

    np.testing.assert_allclose(om.runtime.model("net").predict(X).get(60), EXPECTED)
    om.close()
    with serving(tmp_path / "store", paths=[PLUGINS]) as served:
        reply = httpx.post(f"{served.url}/v1/models/net:predict", json={"instances": X.tolist()}, timeout=60)
        np.testing.assert_allclose(reply.json()["predictions"], EXPECTED)
    np.save(tmp_path / "x.npy", X)
    done = command(
        "predict", "net", "--store", str(tmp_path / "store"), "--input", str(tmp_path / "x.npy"),
        "--output", str(tmp_path / "y.npy"), paths=[PLUGINS],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), EXPECTED)


def test_it_is_loaded_only_when_it_is_needed(tmp_path: Path) -> None:
    code = f"""
import os
import sys
from sklearn.linear_model import LinearRegression
from kindler import Store
om = Store({str(tmp_path / "store")!r})
om.models.put(LinearRegression().fit([[1.0]], [1.0]), "line")
om.models.put(os.path.join, "function")
om.models.get("line")
assert "toy_models" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_cannot_take_the_place_of_a_kind_of_kindlers_own() -> None:
    assert type(MODEL_KINDS.model_kind("onnx")).__module__ == "kindler.models.onnx"


def test_one_that_cannot_be_loaded_stops_nobody_else_and_is_named(
    tmp_path: Path, weighted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    om = Store(tmp_path / "store")
    assert om.models.put(weighted, "net").kind == "toy"
    assert "'broken' (toy_models_of_nobody:BrokenKind) cannot be loaded" in caplog.text
    with pytest.raises(ConfigError, match="'broken'"):
        om.models.put(weighted, "net", kind="broken")
    om.close()


def test_without_the_package_its_models_are_refused_by_name(
    tmp_path: Path, weighted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    om = Store(tmp_path / "store")
    version = om.models.put(weighted, "net")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(PLUGINS)])

    with pytest.raises(ConfigError, match="unknown kind 'toy'"):
        load(om.store, version, trusted=True)
    with pytest.raises(UntrustedError, match="trusted=True"):
        om.models.put(weighted, "other")  # any other object that can be called
    om.close()
