"""PyTorch models and estimators in a store."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kindler import Estimator, Store
from kindler.errors import ConfigError, UntrustedError


class Net(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, width)
        self.again = self.first  # tied
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x) + self.again(x))


@pytest.fixture
def om(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, (3, 1), stride=2, padding=1, bias=False),
        torch.nn.BatchNorm2d(2, eps=1e-3),
        torch.nn.Sequential(torch.nn.LeakyReLU(0.3), torch.nn.Dropout(0.25), torch.nn.Flatten()),
        torch.nn.LazyLinear(2),
    )


def test_a_model_of_torchs_own_layers_needs_no_class(om: Store) -> None:
    x = torch.randn(4, 1, 6, 6)
    model = layers()
    model(x)
    model.eval()
    om.models.put(model, "net")

    again = om.models.get("net")
    assert om.models.metadata("net").meta["form"] == "layers"
    assert repr(again) == repr(model)
    assert not again.training
    assert torch.equal(again(x), model(x))


def test_a_model_of_an_importable_class_is_made_again_with_its_arguments(om: Store) -> None:
    model = Net(width=6).eval()
    om.models.put(model, "net", init={"width": 6})
    x = torch.randn(5, 3)
    with pytest.raises(UntrustedError, match=r"imported by the name.*classes="):
        om.models.get("net")
    assert torch.equal(om.models.get("net", classes=[Net])(x), model(x))
    assert torch.equal(om.models.get("net", trusted=True)(x), model(x))

    with pytest.raises(ConfigError, match="is a different model"):
        om.models.put(model, "net")
    with pytest.raises(ConfigError, match="cannot be built"):
        om.models.put(model, "net", init={"wide": 6})
    assert len(om.models.versions("net")) == 1


def test_a_class_that_others_cannot_import_is_said_so_and_can_be_exported(om: Store) -> None:
    class Local(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    with pytest.raises(ConfigError, match="cannot be imported elsewhere"):
        om.models.put(Local(), "net")
    with pytest.raises(UntrustedError):
        om.models.put(Local(), "net", example=(torch.ones(2),))
    om.models.put(Local(), "net", example=(torch.ones(2),), trusted=True)
    with pytest.raises(UntrustedError):
        om.models.get("net")
    assert om.models.get("net", trusted=True)(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "path",
    [
        "os:system",
        "builtins:dict",
        "no_such_module:Net",
        "torch.nn:Linear.forward",
        "unittest.__main__:Net",
        "torch.nn.parallel.data_parallel:DataParallel",
        "torch.nn.modules.linear:Net",
        "antigravity:Net",
    ],
)
def test_a_manifest_cannot_name_what_is_no_model(om: Store, path: str) -> None:
    version = om.models.put(Net(), "net")
    om.store.publish(
        version.address, kind="torch", meta={**version.meta, "class": path}, shared=version.files
    )
    before = set(sys.modules)
    with pytest.raises(UntrustedError, match=re.escape(path)):
        om.models.get("net")
    assert set(sys.modules) == before  # nothing was imported


@pytest.mark.parametrize("path", ["os:system", "no_such_module:Net", "torch.nn:Linear.forward"])
def test_a_trusted_manifest_must_name_a_class_of_models(om: Store, path: str) -> None:
    version = om.models.put(Net(), "net")
    om.store.publish(
        version.address, kind="torch", meta={**version.meta, "class": path}, shared=version.files
    )
    with pytest.raises(ConfigError, match=re.escape(path)):
        om.models.get("net", trusted=True)


def test_a_module_that_calls_sys_exit_when_it_is_imported_does_not_end_the_process(
    om: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    version = om.models.put(Net(), "net")
    om.store.publish(
        version.address, kind="torch", meta={**version.meta, "class": "leaves:Net"}, shared=version.files
    )
    with pytest.raises(ConfigError, match=r"SystemExit\(3\)"):
        om.models.get("net", trusted=True)


@pytest.mark.parametrize(
    "layers",
    [
        {"layer": "DataParallel", "with": {}},
        {"layer": "__class__", "with": {}},
        {"layer": "Linear", "with": {"in_features": 3, "out_features": 4, "device": "cuda"}},
        {"layer": "Linear", "with": {"in_features": 10**9, "out_features": 10**9}},
        {"layer": "Linear", "with": {"in_features": "3", "out_features": 4}},
        {"layer": "Sequential", "children": [["0", {"same": ".7"}]]},
        {"layer": "Sequential", "children": [["0", None]]},
        {"layer": "Identity", "with": {}},
    ],
)
def test_a_manifest_cannot_describe_what_is_not_a_model_of_its_weights(om: Store, layers: Any) -> None:
    version = om.models.put(torch.nn.Linear(3, 4), "net")
    om.store.publish(
        version.address, kind="torch", meta={**version.meta, "layers": layers}, shared=version.files
    )
    with pytest.raises(ConfigError, match="the stored PyTorch model cannot be rebuilt"):
        om.models.get("net")


def test_a_pickled_file_is_refused_and_a_trusted_one_is_read(om: Store, tmp_path: Path) -> None:
    torch.save(Net(), tmp_path / "net.pt")
    with pytest.raises(UntrustedError, match="pickle"):
        om.models.put(tmp_path / "net.pt", "net")
    om.models.put(tmp_path / "net.pt", "net", trusted=True)
    with pytest.raises(UntrustedError, match="pickle"):
        om.models.get("net")
    assert isinstance(om.models.get("net", trusted=True), Net)


def trained() -> tuple[Estimator, dict[str, Any]]:
    random = np.random.default_rng(0)
    data = {"a": random.random((64, 3), np.float32), "t": random.random((64, 2), np.float32)}
    estimator = Estimator.from_torch(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        workers=1,
        engine="local",
    )
    estimator.fit(data, epochs=2, batch_size=16, feature_cols="a", label_cols="t", verbose=0)
    return estimator, data


def test_an_estimator_comes_back_with_its_history_and_its_columns(om: Store) -> None:
    estimator, data = trained()
    om.models.put(estimator, "est", tag="prod")

    again = om.models.get("est@prod", workers=1, engine="local")
    assert list(again.history) == list(estimator.history)
    assert again.history.goodput == estimator.history.goodput is not None
    assert again.signature == estimator.signature
    assert again.signature["layout"]["a"] == ["float32", [3]]
    np.testing.assert_array_equal(again.predict(data)["prediction"], estimator.predict(data)["prediction"])

    more = om.models.get(
        "est",
        workers=1,
        engine="local",
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
    )
    more.fit(data, epochs=1, batch_size=16, feature_cols="a", label_cols="t", verbose=0)
    assert len(more.history) == 3


def test_a_store_of_other_things_loads_no_framework(tmp_path: Path) -> None:
    code = f"""
import sys
import kindler
om = kindler.Store({str(tmp_path / "s")!r})
om.datasets.put([1], "x")
om.datasets.get("x")
om.models.list()
print(sorted({{"torch", "tensorflow", "keras", "jax", "pyspark", "sklearn", "pandas"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
