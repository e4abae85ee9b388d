"""The PyTorch programs of Orca's guide run on a DataFrame with their import line changed and nothing else."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from kindler import Estimator  # the changed line
from tests.whole import whole_only

pytestmark = pytest.mark.spark

args = SimpleNamespace(lr=0.01, epochs=3)


class LeNet(nn.Module):
    """A convolutional classifier of 8 x 8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(2 * 2 * 32, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    images, labels = load_digits(return_X_y=True)
    rows = [
        ((image / 16).reshape(1, 8, 8).tolist(), int(label))
        for image, label in zip(images, labels, strict=True)
    ]
    return spark.createDataFrame(rows, "image array<array<array<float>>>, label long").cache()


def accuracy(predictions: Any) -> float:
    rows = predictions.select("label", "prediction").collect()
    return float(np.mean([np.argmax(row.prediction) == row.label for row in rows]))


def test_model_and_optimizer_instances(df: Any) -> None:
    torch.manual_seed(1)
    model = LeNet()  # a torch.nn.Module
    model.train()
    criterion = nn.NLLLoss()

    adam = torch.optim.Adam(model.parameters(), args.lr)
    est = Estimator.from_torch(model=model, optimizer=adam, loss=criterion)

    est.fit(data=df, epochs=args.epochs, feature_cols=["image"], label_cols=["label"], verbose=0)
    predictions = est.predict(data=df, feature_cols=["image"])

    assert accuracy(predictions) > 0.9


def test_creators_with_a_config(df: Any) -> None:
    def model_creator(config: dict[str, Any]) -> nn.Module:
        model = LeNet()  # a torch.nn.Module
        model.train()
        return model

    def optimizer_creator(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), config["lr"])

    est = Estimator.from_torch(
        model=model_creator, optimizer=optimizer_creator, loss=nn.NLLLoss(), config={"lr": 1e-2}
    )
    est.fit(data=df, epochs=args.epochs, feature_cols=["image"], label_cols=["label"], verbose=0)

    assert accuracy(est.predict(data=df, feature_cols=["image"])) > 0.9


@whole_only
def test_the_guides_own_mixture_of_an_instance_and_a_creator(df: Any) -> None:
    model = LeNet()

    def optimizer_creator(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), config["lr"])

    est = Estimator.from_torch(
        model=model,
        optimizer=optimizer_creator,
        loss=nn.NLLLoss(),
        config={"lr": 1e-2},
    )
    est.fit(data=df, epochs=args.epochs, feature_cols=["image"], label_cols=["label"], verbose=0)

    assert accuracy(est.predict(data=df, feature_cols=["image"])) > 0.9
    assert est.get_model() is model


def test_programs_on_xshards(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parent / "orca_xshards_torch.py"), run_name="__main__")
    seen = json.loads(capsys.readouterr().out.splitlines()[-1])

    assert seen["engine"] == "spark"
    assert all(set(rows) == {1797} for rows in seen["num_samples"])
    assert all(accuracy > 0.9 for accuracy in seen["accuracy"])
    assert all(shapes == [[1797, 10]] for shapes in seen["shapes"])
