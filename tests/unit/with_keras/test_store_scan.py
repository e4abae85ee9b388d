"""`.keras` files that were made by hand: nothing that leads out of the file passes without trust."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flavour
import h5py
import numpy as np
import pytest

from kindler import Store
from kindler.errors import ConfigError, UntrustedError
from kindler.models.safety.keras_file import dangers

pytestmark = pytest.mark.skipif(
    flavour.FLAVOUR not in ("tensorflow", "tf_keras"), reason="the same code for every backend"
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, keras: Any) -> Path:
    path = tmp_path_factory.mktemp("good") / "good.keras"
    inputs = keras.layers.Input((4,))
    keras.Model(inputs, keras.layers.Dense(2, activation="relu", name="dense")(inputs)).save(path)
    return path


def changed(
    good: Path,
    path: Path,
    layer: Callable[[dict[str, Any]], Any] | None = None,
    weights: Callable[[h5py.File], Any] | None = None,
    packing: int = zipfile.ZIP_STORED,
    extra: dict[str, bytes] | None = None,
) -> Path:
    """The file with another configuration of its one layer, other weights, or more entries."""
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w", packing) as target:
        for name in source.namelist():
            data = source.read(name)
            if name == "config.json" and layer is not None:
                told = json.loads(data)
                layer(next(one for one in told["config"]["layers"] if one["class_name"] == "Dense"))
                data = json.dumps(told).encode()
            if name.endswith(".h5") and weights is not None:
                beside = path.with_suffix(".h5")
                beside.write_bytes(data)
                with h5py.File(beside, "r+") as opened:
                    weights(opened)
                data = beside.read_bytes()
            target.writestr(name, data)
        for name, data in (extra or {}).items():
            target.writestr(name, data)
    return path


def found(path: Path) -> list[str]:
    return dangers(path, is_registered=lambda name: False)


def test_a_file_that_keras_wrote_passes(good: Path, tmp_path: Path) -> None:
    assert found(good) == []
    assert found(changed(good, tmp_path / "x.keras", packing=zipfile.ZIP_DEFLATED)) == []


def replaced(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda layer: layer.update(entries)


def configured(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda layer: layer["config"].update(entries)


FUNCTION = {"class_name": "function", "module": "builtins", "registered_name": "function"}


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        (replaced(class_name="Lambda"), "a Lambda layer"),
        (replaced(class_name="pkg>Lambda"), "a pkg>Lambda layer"),
        (replaced(registered_name="Lambda"), r"keras\.layers\.Dense"),
        (replaced(registered_name=["Lambda"]), r"keras\.layers\.Dense"),
        (replaced(class_name=["Dense"]), "not a name"),
        (replaced(class_name="TFSMLayer"), "a TFSMLayer layer"),
        (replaced(class_name="DenseFeatures"), "DenseFeatures"),
        (replaced(class_name="SomethingNew"), "SomethingNew"),
        (replaced(class_name="SomethingNew", module=None), "SomethingNew"),
        (replaced(class_name="TFOpLambda", config={"function": "io.read_file"}), r"io\.read_file"),
        (replaced(class_name="SlicingOpLambda", config={"function": "io.read_file"}), r"io\.read_file"),
        (replaced(class_name="TFOpLambda", config=None), "TFOpLambda of None"),
        (replaced(module="keras.utils"), r"keras\.utils\.Dense"),
        (replaced(module="keras.src.saving"), r"keras\.src\.saving\.Dense"),
        (replaced(module="keras_hub.layers"), r"keras_hub\.layers\.Dense"),
        (replaced(module="unittest.__main__"), r"unittest\.__main__\.Dense"),
        (configured(activation={**FUNCTION, "config": "load_model"}), "load_model"),
        (configured(activation={**FUNCTION, "config": "relu", "registered_name": "get"}), "relu"),
        (configured(activation={**FUNCTION, "config": "relu", "module": "os"}), "of an unknown module"),
        (configured(activation="deserialize"), "deserialize"),
        (
            configured(kernel_initializer={"class_name": "system", "module": "os", "config": {}}),
            r"os\.system",
        ),
        (configured(anything=[{"deep": {"class_name": "__lambda__", "config": {}}}]), "a __lambda__ layer"),
        (configured(anything={"class_name": "__typespec__", "config": {}}), "__typespec__"),
        (configured(vocabulary="/etc/passwd"), r"/etc/passwd"),
        (
            configured(vocabulary={"class_name": "__bytes__", "config": {"value": "/etc/passwd"}}),
            "vocabulary",
        ),
    ],
)
def test_a_name_that_is_not_on_the_list_is_found(
    good: Path, tmp_path: Path, layer: Any, problem: str
) -> None:
    (only,) = found(changed(good, tmp_path / "evil.keras", layer))
    assert re.search(problem, only)


@pytest.mark.parametrize("name", ["StringLookup", "IntegerLookup", "TextVectorization"])
def test_a_vocabulary_outside_of_the_file_is_not_read(good: Path, tmp_path: Path, name: str) -> None:
    om = Store(tmp_path / "store")
    config = {"name": "dense", "vocabulary": "/etc/passwd"}
    path = changed(good, tmp_path / "evil.keras", replaced(class_name=name, config=config))
    with pytest.raises(UntrustedError, match="/etc/passwd"):
        om.models.put(path, "evil")
    om.models.put(path, "evil", trusted=True)
    with pytest.raises(UntrustedError, match="/etc/passwd"):
        om.models.get("evil")


def external(file: h5py.File) -> None:
    file.create_dataset("x", (4,), "u1", external=[("/etc/passwd", 0, 4)])


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((4,), "u1")
    layout[:] = h5py.VirtualSource("/etc/other.h5", "x", (4,))
    file.create_group("deep/er").create_virtual_dataset("x", layout)


def link(file: h5py.File) -> None:
    file["x"] = h5py.ExternalLink("/etc/other.h5", "/x")


def soft(file: h5py.File) -> None:
    file["x"] = h5py.SoftLink("/y")


def huge(file: h5py.File) -> None:
    file.create_dataset("x", (1 << 40,), "u1", chunks=(1 << 16,))


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        (external, "the weights 'x', which are in other files"),
        (virtual, "the weights 'x', which are in other files"),
        (link, "the weights 'x', which are a link"),
        (soft, "the weights 'x', which are a link"),
        (huge, "the weights 'x', which are larger than what is stored of them"),
    ],
)
def test_weights_that_lie_elsewhere_are_found(
    good: Path, tmp_path: Path, weights: Any, problem: str, packing: int
) -> None:
    assert found(changed(good, tmp_path / "evil.keras", weights=weights, packing=packing)) == [problem]


def test_groups_that_contain_themselves_do_not_hang(good: Path, tmp_path: Path) -> None:
    def ring(file: h5py.File) -> None:
        file.create_group("a")["again"] = file["/"]

    assert found(changed(good, tmp_path / "ring.keras", weights=ring)) == []


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"config.json": b"{}"}, "two entries with the same name"),
        ({"model.weights.json": b"{}"}, r"entry 'model\.weights\.json'"),
        ({"assets/../../x": b""}, r"without '\.\.'"),
        ({"assets//etc/x": b""}, "not a valid path"),
        ({"/etc/x": b""}, "entry '/etc/x'"),
        ({"assets/x.h5": b"not HDF5"}, r"is not a \.keras file"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_that_does_not_belong_there_is_refused(
    good: Path, tmp_path: Path, extra: dict[str, bytes], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        found(changed(good, tmp_path / "evil.keras", extra=extra))


def test_a_configuration_that_is_nested_without_end_is_refused(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "[" * 100_000 + "]" * 100_000)
    with pytest.raises(ConfigError, match=r"not a \.keras file"):
        found(path)


def test_a_model_of_operations_needs_no_trust(keras: Any, tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    inputs = keras.layers.Input((4,))
    model = keras.Model(inputs, ((inputs + 1.0) * 2.0)[:, :2])
    om.models.put(model, "sums")
    x = np.ones((3, 4), np.float32)
    np.testing.assert_allclose(om.models.get("sums").predict(x, verbose=0), np.full((3, 2), 4.0))
