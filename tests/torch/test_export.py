"""Trained PyTorch models as ONNX and OpenVINO: they compute what the model does, for any number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Estimator, XShards
from kindler.errors import ConfigError

pytest.importorskip("openvino")
pytestmark = pytest.mark.torch

X = np.random.default_rng(0).normal(size=(37, 1, 8, 8)).astype("float32")
Y = (X.mean(axis=(1, 2, 3)) > 0).astype("int64")


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 2)
    )


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def trained() -> Estimator:
    est = Estimator.from_torch(
        model=network, optimizer=torch.optim.Adam, loss=nn.CrossEntropyLoss(), workers=1
    )
    est.fit((X, Y), epochs=2, batch_size=16, verbose=0)
    return est


def test_files_of_a_trained_model_predict_as_it_does(trained: Estimator, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    expected = trained.predict(X)
    trained.to_openvino(tmp_path / "net.xml")
    trained.to_onnx(tmp_path / "net.onnx")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.bin", "net.onnx", "net.xml"]
    for name in ("net.xml", "net.onnx"):
        close(Estimator.from_openvino(tmp_path / name).predict(X, batch_size=5), expected)
    [found] = onnxruntime.InferenceSession(str(tmp_path / "net.onnx")).run(["prediction"], {"x": X})
    close(found, expected)


def test_openvino_scores_arrays_shards_and_files_as_torch_does(trained: Estimator, tmp_path: Path) -> None:
    expected = trained.predict(X)

    close(trained.predict(X, batch_size=5, accelerator="openvino"), expected)
    first = trained._converted
    shards = trained.predict(
        XShards.partition({"x": X}, 2, engine="local"), accelerator="openvino", verbose=0
    )
    close(np.concatenate([shard["prediction"] for shard in shards.collect()]), expected)
    assert trained._converted is first  # converted once
    with pytest.raises(ConfigError, match=r"accelerator must be 'openvino', or None"):
        trained.predict(X, accelerator="onnx")  # type: ignore[arg-type]


def test_new_weights_are_converted_again() -> None:
    model = nn.Linear(3, 1)
    est = Estimator.from_torch(model=model, optimizer=torch.optim.SGD, loss=nn.MSELoss(), workers=1)
    x = np.ones((4, 3), "float32")
    before = est.predict(x, accelerator="openvino")
    with torch.no_grad():
        model.bias += 1.0
    close(est.predict(x, accelerator="openvino"), before + 1)
    est.fit((x, np.zeros((4, 1), "float32")), verbose=0)
    close(est.predict(x, accelerator="openvino"), est.predict(x))
    assert model.training  # as it was handed in


class Named(nn.Module):
    """Takes columns by name, and names its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        vectors = self.table(columns["token"]) * columns["scale"][:, None]
        return {"vector": vectors, "norm": vectors.norm(dim=1)}


def test_names_of_inputs_and_outputs_are_kept(tmp_path: Path) -> None:
    est = Estimator.from_torch(model=Named(), inputs="dict")
    data = {"scale": np.linspace(1, 2, 6).astype("float32"), "token": np.arange(6) % 5}
    columns = ["token", "scale"]
    expected = est.predict(data, feature_cols=columns)
    found = est.predict(data, feature_cols=columns, accelerator="openvino")

    assert list(found) == ["scale", "token", "vector", "norm"]
    for name in ("vector", "norm"):
        close(found[name], expected[name])
    with pytest.raises(ConfigError, match=r"not known before fit\(\).*\n.*example="):
        est.to_openvino(tmp_path / "net.xml")
    est.to_openvino(tmp_path / "net.xml", example={name: data[name] for name in columns})
    again = Estimator.from_openvino(tmp_path / "net.xml").predict(data, feature_cols=["scale", "token"])
    close(again["prediction_1"], expected["norm"])  # by name, in another order


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if bool((x == 0).all()) else x * 2


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize("model", [Branching(), Noisy()], ids=["branching", "noisy"])
def test_a_model_that_tracing_would_change_is_refused(model: nn.Module) -> None:
    est = Estimator.from_torch(model=model)

    with pytest.raises(ConfigError, match=r"computes different results than the model"):
        est.predict(np.zeros((4, 2), "float32"), accelerator="openvino")


def test_names_that_say_another_format_are_refused(trained: Estimator, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in .xml"):
        trained.to_openvino(tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())
