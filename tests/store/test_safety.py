"""Nothing gets out of the store, and nothing in it runs, unless the caller says so."""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from sklearn.svm import SVC, SVR
from sklearn.tree import DecisionTreeRegressor

from kindler import Store
from kindler.errors import ConfigError, DamagedError, StoreError, UntrustedError
from kindler.models.loaded import load
from kindler.models.safety.onnx_file import scan

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
def test_names_that_could_lead_elsewhere_are_refused_by_every_verb(local: Store, name: str) -> None:
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
def test_a_version_cannot_be_put(local: Store, name: str) -> None:
    with pytest.raises(ConfigError, match="name alone"):
        local.datasets.put(1, name)


class Evil:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_needs_trust_on_both_sides(local: Store, tmp_path: Path) -> None:
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
def test_a_file_that_is_a_pickle_is_refused(local: Store, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"evil{suffix}"
    path.write_bytes(pickle.dumps(Evil(tmp_path / "mark")))
    with pytest.raises(UntrustedError):
        local.models.put(path, "evil")
    local.models.put(path, "evil", trusted=True)
    with pytest.raises(UntrustedError):
        local.models.get("evil")
    assert not (tmp_path / "mark").exists()


def test_a_scikit_learn_model_is_stored_without_a_pickle(local: Store) -> None:
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit([[0.0], [1.0]], [0, 1])
    version = local.models.put(model, "lr")

    assert version.kind == "sklearn"
    assert local.models.get("lr").predict([[0.0], [1.0]]).tolist() == [0, 1]


@pytest.mark.parametrize("model", [MLPRegressor(max_iter=3), GaussianProcessRegressor()])
def test_scikit_learns_own_plain_types_need_no_trust(local: Store, model: Any) -> None:
    x = np.arange(8.0).reshape(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has not converged
        model.fit(x, x.sum(1))
    local.models.put(model, "plain")

    assert local.models.get("plain").predict(x).tolist() == model.predict(x).tolist()


def test_a_scikit_learn_model_of_trees_needs_trust(local: Store) -> None:
    with pytest.raises(UntrustedError, match="Tree"):
        local.models.put(DecisionTreeRegressor().fit([[0.0], [1.0]], [0, 1]), "tree")


def _ahead_of_its_state() -> MLPRegressor:
    """A generator that says that it stands behind the end of its numbers, where numpy reads on."""
    model = MLPRegressor(max_iter=1).fit(X, X[:, 0])
    model._random_state.set_state(("MT19937", np.zeros(624, "u4"), 1 << 20))
    return model


X = np.arange(16.0).reshape(8, 2)
BELIEVING: dict[str, Callable[[], Any]] = {
    "SVC": lambda: SVC().fit(X, X[:, 0] > 7),
    "SVR": lambda: SVR().fit(X, X[:, 0]),
    "KMeans": lambda: KMeans(2, n_init=1).fit(X),
    "KNeighborsRegressor": lambda: KNeighborsRegressor(1, algorithm="brute").fit(X, X[:, 0]),
    "OneHotEncoder": lambda: OneHotEncoder().fit(X),
    "CountVectorizer": lambda: CountVectorizer().fit(["one word", "and another"]),
    "RandomState": _ahead_of_its_state,
}


@pytest.mark.parametrize("name", BELIEVING)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a pipeline"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_compiled_code_of_scikit_learn_that_believes_its_file_is_not_given_one_without_trust(
    local: Store, name: str, inside: bool
) -> None:
    model = BELIEVING[name]()
    local.models.put(make_pipeline(StandardScaler(), model) if inside else model, "model")
    with pytest.raises(UntrustedError, match=f"compiled code would trust what the file says about .*{name}"):
        local.models.get("model")
    fitted = local.models.get("model", trusted=True)
    assert type(fitted[-1] if inside else fitted) is type(model)
    unfitted = local.models.get("model", unfitted=True)  # of which only the settings are read
    assert not [field for field in vars(unfitted[-1] if inside else unfitted) if field.endswith("_")]


def test_a_scikit_learn_model_with_a_function_of_its_own_needs_trust(local: Store) -> None:
    model = FunctionTransformer(os.path.basename)
    with pytest.raises(UntrustedError, match="posixpath"):
        local.models.put(model, "f")
    local.models.put(model, "f", trusted=True)
    with pytest.raises(UntrustedError, match="posixpath"):
        local.models.get("f")
    assert local.models.get("f", trusted=True).func is os.path.basename


def field(number: int, data: bytes) -> bytes:
    """A field of a protocol buffer."""
    return bytes([number << 3 | 2, len(data)]) + data


def onnx(location: str) -> bytes:
    """A model with one tensor that lies in another file."""
    entry = field(1, b"location") + field(2, location.encode())
    return field(7, field(5, field(8, b"w") + field(13, entry)))


def test_an_onnx_model_brings_the_file_beside_it_and_no_other(local: Store, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(onnx("weights.bin"))
    with pytest.raises(ConfigError, match=r"weights\.bin"):
        local.models.put(path, "net")
    (tmp_path / "weights.bin").write_bytes(b"w")
    local.models.put(str(path), "net")
    folder = local.models.get("net", local=tmp_path / "out")
    assert sorted(file.name for file in folder.iterdir()) == ["net.onnx", "weights.bin"]
    with pytest.raises(ConfigError, match=r"onnxruntime cannot load net\.onnx"):
        local.models.get("net")

    for place in ("/etc/passwd", "../secret", "a/../../b"):
        path.write_bytes(onnx(place))
        with pytest.raises(UntrustedError, match="it reads the file"):
            local.models.put(path, "net")
    path.write_bytes(b"no model")
    with pytest.raises(ConfigError, match="not an ONNX model"):
        local.models.put(path, "net")


def test_openvino_files_are_kept_together(local: Store, tmp_path: Path) -> None:
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


def test_an_archive_that_was_made_by_hand_is_read(local: Store, tmp_path: Path) -> None:
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
    local: Store, tmp_path: Path, changes: dict[str, Any]
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises((ConfigError, DamagedError), match="archive|blob|path|name=|kind|SHA-256"):
        local.datasets.import_(archive(inside / "a.zip", **changes))
    assert local.datasets.list(hidden=True) == []
    assert not (tmp_path / "out").exists()
    assert not list(local.store.blobs.stage.glob("*"))


def test_an_archive_that_is_cut_off_is_refused(local: Store, tmp_path: Path) -> None:
    path = archive(tmp_path / "a.zip")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ConfigError, match="not a complete store archive"):
        local.datasets.import_(path)


def test_links_are_not_followed_into_the_store(local: Store, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "saved_model.pb").write_bytes(b"")
    (model / "link").symlink_to("/etc/passwd")
    with pytest.raises((StoreError, ConfigError), match="link"):
        local.models.put(model, "x", trusted=True)
    assert local.models.list() == []


def republished(om: Store, version: Any, path: Path, **meta: Any) -> Store:
    """The same files under other metadata, as an archive of others may have them."""
    with zipfile.ZipFile(om.models.export(str(version), path)) as source:
        told = json.loads(source.read("kindler.json"))
        files = {name: source.read(name) for name in source.namelist() if name != "kindler.json"}
    told["meta"] |= meta
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("kindler.json", json.dumps(told))
        for name, data in files.items():
            target.writestr(name, data)
    om.models.import_(path)
    return om


@pytest.mark.parametrize(
    "place", ["../secret.onnx", "/etc/secret.onnx", "a/../../secret.onnx", "no.onnx", 3, ""]
)
@pytest.mark.parametrize("kind", ["onnx", "openvino"])
def test_metadata_cannot_name_a_file_outside_of_the_version(
    local: Store, tmp_path: Path, place: Any, kind: str
) -> None:
    source = tmp_path / f"net{'.onnx' if kind == 'onnx' else '.xml'}"
    source.write_bytes(onnx("weights.bin"))
    for name in ("weights.bin", "net.bin"):
        (tmp_path / name).write_bytes(b"w")
    version = local.models.put(source, "net")
    republished(local, version, tmp_path / "x.zip", file=place)
    with pytest.raises(ConfigError, match=r"not a valid path of a stored file|has no file"):
        load(local.store, local.models.metadata("net"), trusted=False)


def test_an_onnx_model_is_looked_through_again_when_it_is_loaded(local: Store, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(onnx("/etc/passwd"))
    version = local.models.put(tmp_path / "net.onnx", "net", trusted=True)
    with pytest.raises(UntrustedError, match="/etc/passwd"):
        load(local.store, version, trusted=False)
    (tmp_path / "net.onnx").write_bytes(onnx("beside.bin"))
    (tmp_path / "beside.bin").write_bytes(b"w")
    version = local.models.put(tmp_path / "net.onnx", "net")
    kept = [file for file in version.files if file.path == "net.onnx"]
    alone = local.store.publish(version.address, kind="onnx", meta=version.meta, shared=kept)
    with pytest.raises(ConfigError, match=r"no file 'beside\.bin'"):
        load(local.store, alone, trusted=False)


@pytest.mark.parametrize(
    ("node", "function", "refused"),
    [
        (field(4, b"Relu"), b"", False),
        (field(4, b"Gelu") + field(7, b"com.microsoft"), b"", False),
        (field(4, b"EPContext") + field(7, b"com.microsoft"), b"", True),
        (field(4, b"AzureTextToText") + field(7, b"com.microsoft.extensions"), b"", True),
        (field(4, b"F") + field(7, b"mine"), field(1, b"F") + field(10, b"mine"), False),
        (field(4, b"G") + field(7, b"mine"), field(1, b"F") + field(10, b"mine"), True),
    ],
)
def test_an_onnx_model_of_operations_of_others_needs_trust(
    local: Store, tmp_path: Path, node: bytes, function: bytes, refused: bool
) -> None:
    functions = bytes([25 << 3 & 0x7F | 0x80 | 2, 1, len(function)]) + function if function else b""
    (tmp_path / "net.onnx").write_bytes(field(7, field(1, node)) + functions)
    if not refused:
        local.models.put(tmp_path / "net.onnx", "net")
        return
    with pytest.raises(UntrustedError, match="the operator"):
        local.models.put(tmp_path / "net.onnx", "net")


def test_tensors_in_the_attributes_of_a_function_are_looked_at(tmp_path: Path) -> None:
    entry = field(1, b"location") + field(2, b"/etc/passwd")
    function = field(11, field(5, field(13, entry)))
    functions = bytes([25 << 3 & 0x7F | 0x80 | 2, 1, len(function)]) + function
    (tmp_path / "net.onnx").write_bytes(field(7, b"") + functions)
    assert scan(tmp_path / "net.onnx").files == ["/etc/passwd"]


ZERO = "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9"


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [["a", ZERO, 1], ["a", ZERO, 1]]},
        {"files": [["a", ZERO, 1], ["a/b", ZERO, 1]]},
        {"files": [["a", ZERO, 10**12]]},
        {"files": [["a", ZERO, "many"]]},
        {"files": [["a", ZERO]]},
        {"files": 3},
        {"meta": []},
        {"attributes": None},
        {"kind": None},
        {"shelf": ["datasets"]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_malformed_archive_is_said_to_be_one(local: Store, tmp_path: Path, changes: dict[str, Any]) -> None:
    told = {"files": [["value.json", ZERO, 1]]} | changes
    path = tmp_path / "a.zip"
    archive(path)
    with zipfile.ZipFile(path) as source:
        whole = json.loads(source.read("kindler.json"))
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("kindler.json", json.dumps(whole | told))
        out.writestr("files/a", "0")
    with pytest.raises(ConfigError, match=r"archive|unpacks|two files|within another"):
        local.datasets.import_(path)
    assert local.datasets.list(hidden=True) == []


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[" * 100_000, b"3", b"null"])
def test_an_archive_whose_description_is_not_one_is_refused(
    local: Store, tmp_path: Path, text: bytes
) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as out:
        out.writestr("kindler.json", text)
    with pytest.raises(ConfigError, match="archive"):
        local.datasets.import_(tmp_path / "a.zip")


def test_two_files_at_one_path_cannot_write_over_a_blob(local: Store) -> None:
    first, second = local.datasets.put(1, "one"), local.datasets.put(2, "two")
    with pytest.raises(ConfigError, match="two files at the same path"):
        local.store.publish(first.address, kind="json", shared=[*first.files, *second.files])
    forged = replace(first, files=(*first.files, *second.files))
    with pytest.raises(ConfigError, match="two files"), local.store.files(forged):
        pass
    assert (local.datasets.get("one"), local.datasets.get("two")) == (1, 2)
