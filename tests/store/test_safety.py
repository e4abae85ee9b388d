"""Nothing gets out of the store, and nothing in it runs, unless the caller says so."""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.tree import DecisionTreeRegressor

from kindler import Omega
from kindler.errors import ConfigError, DamagedError, StoreError, UntrustedError

NAMES = [
    "../x",
    "a/../../b",
    "/etc/passwd",
    "a\0b",
    "a\nb",
    "",
    ".",
    "a//b",
    "a/",
    " a",
    "a\\b",
    "x" * 10_000,
    "a*",
    "a\u202eb",
    "a\ud800b",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_that_could_lead_elsewhere_are_refused_by_every_verb(local: Omega, name: str) -> None:
    shelf = local.datasets
    for call in (
        lambda: shelf.put(1, name),
        lambda: shelf.get(name),
        lambda: shelf.exists(name),
        lambda: shelf.drop(name),
        lambda: shelf.metadata(name),
        lambda: shelf.versions(name),
        lambda: shelf.copy("x", name),
        lambda: local[name],
        lambda: shelf.put(1, "x", mode="replace", tag=name),
    ):
        with pytest.raises(ValueError, match="."):
            call()
    assert shelf.list(hidden=True) in ([], ["x"])


@pytest.mark.parametrize("name", ["a@1", "a^", "a@prod"])
def test_a_version_cannot_be_put(local: Omega, name: str) -> None:
    with pytest.raises(ConfigError, match="name alone"):
        local.datasets.put(1, name)


class Evil:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_needs_trust_on_both_sides(local: Omega, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(UntrustedError):
        local.models.put(Evil(mark), "evil", kind="pickle")
    local.models.put(Evil(mark), "evil", kind="pickle", trusted=True)
    with pytest.raises(PermissionError, match="trusted=True"):
        local.models.get("evil")
    assert not mark.exists()

    local.models.get("evil", trusted=True)
    assert mark.exists()


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pkl", ".joblib"])
def test_a_file_that_is_a_pickle_is_refused(local: Omega, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"evil{suffix}"
    path.write_bytes(pickle.dumps(Evil(tmp_path / "mark")))
    with pytest.raises(UntrustedError):
        local.models.put(path, "evil")
    local.models.put(path, "evil", trusted=True)
    with pytest.raises(UntrustedError):
        local.models.get("evil")
    assert not (tmp_path / "mark").exists()


def test_a_scikit_learn_model_is_stored_without_a_pickle(local: Omega) -> None:
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit([[0.0], [1.0]], [0, 1])
    version = local.models.put(model, "lr")

    assert version.kind == "sklearn"
    assert local.models.get("lr").predict([[0.0], [1.0]]).tolist() == [0, 1]


@pytest.mark.parametrize("model", [MLPRegressor(max_iter=3), GaussianProcessRegressor()])
def test_scikit_learns_own_plain_types_need_no_trust(local: Omega, model: Any) -> None:
    x = np.arange(8.0).reshape(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has not converged
        model.fit(x, x.sum(1))
    local.models.put(model, "plain")

    assert local.models.get("plain").predict(x).tolist() == model.predict(x).tolist()


def test_a_scikit_learn_model_of_trees_needs_trust(local: Omega) -> None:
    with pytest.raises(UntrustedError, match="Tree"):
        local.models.put(DecisionTreeRegressor().fit([[0.0], [1.0]], [0, 1]), "tree")


def test_a_scikit_learn_model_with_a_function_of_its_own_needs_trust(local: Omega) -> None:
    model = FunctionTransformer(os.path.basename)
    with pytest.raises(UntrustedError, match="posixpath"):
        local.models.put(model, "f")
    local.models.put(model, "f", trusted=True)
    with pytest.raises(UntrustedError, match="posixpath"):
        local.models.get("f")
    assert local.models.get("f", trusted=True).func is os.path.basename


def onnx(location: str) -> bytes:
    """A model with one tensor that lies in another file."""

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    entry = field(1, b"location") + field(2, location.encode())
    return field(7, field(5, field(8, b"w") + field(13, entry)))


def test_an_onnx_model_brings_the_file_beside_it_and_no_other(local: Omega, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(onnx("weights.bin"))
    with pytest.raises(ConfigError, match=r"weights\.bin"):
        local.models.put(path, "net")
    (tmp_path / "weights.bin").write_bytes(b"w")
    local.models.put(str(path), "net")
    folder = local.models.get("net", local=tmp_path / "out")
    assert sorted(file.name for file in folder.iterdir()) == ["net.onnx", "weights.bin"]
    with pytest.raises(ConfigError, match="local=folder"):
        local.models.get("net")

    for place in ("/etc/passwd", "../secret", "a/../../b"):
        path.write_bytes(onnx(place))
        with pytest.raises(UntrustedError, match="it reads the file"):
            local.models.put(path, "net")
    path.write_bytes(b"no model")
    with pytest.raises(ConfigError, match="no ONNX model"):
        local.models.put(path, "net")


def test_openvino_files_are_kept_together(local: Omega, tmp_path: Path) -> None:
    (tmp_path / "net.xml").write_text("<net/>")
    with pytest.raises(ConfigError, match=r"net\.bin"):
        local.models.put(tmp_path / "net.xml", "net")
    (tmp_path / "net.bin").write_bytes(b"w")
    assert local.models.put(tmp_path / "net.xml", "net").kind == "openvino"


def archive(path: Path, **changes: Any) -> Path:
    told = {
        "format": 1,
        "name": "x",
        "shelf": "datasets",
        "kind": "json",
        "meta": {},
        "attributes": {},
        "files": [["value.json", "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9", 1]],
    } | changes
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("kindler.json", json.dumps(told))
        for name, _, _ in told["files"]:
            out.writestr(f"files/{name}", "0")
    return path


def test_an_archive_that_was_made_by_hand_is_read(local: Omega, tmp_path: Path) -> None:
    local.datasets.import_(archive(tmp_path / "a.zip"))
    assert local.datasets.get("x") == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [["../out", "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9", 1]]},
        {"files": [["/tmp/out", "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9", 1]]},
        {"files": [["a/../../out", "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9", 1]]},
        {"files": [["out", "../../x", 1]]},
        {"files": [["out", "0" * 64, 1]]},
        {"files": [["out", "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9", 0]]},
        {"name": "../x"},
        {"name": 3},
        {"shelf": "models"},
        {"format": 2},
        {"kind": "unknown"},
    ],
)
def test_an_archive_cannot_name_what_is_not_its_own(
    local: Omega, tmp_path: Path, changes: dict[str, Any]
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises((ConfigError, DamagedError)):
        local.datasets.import_(archive(inside / "a.zip", **changes))
    assert local.datasets.list(hidden=True) == []
    assert not (tmp_path / "out").exists()
    assert not list(local.store.blobs.stage.glob("*"))


def test_an_archive_that_is_cut_off_is_refused(local: Omega, tmp_path: Path) -> None:
    path = archive(tmp_path / "a.zip")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ConfigError, match="no whole archive"):
        local.datasets.import_(path)


def test_links_are_not_followed_into_the_store(local: Omega, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "saved_model.pb").write_bytes(b"")
    (model / "link").symlink_to("/etc/passwd")
    with pytest.raises((StoreError, ConfigError)):
        local.models.put(model, "x", trusted=True)
    assert local.models.list() == []
