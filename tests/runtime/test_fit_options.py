"""Options of a fit come one by one, as JSON; the estimator gets them in its groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler import Estimator, Store
from kindler.errors import UntrustedError
from kindler.runtime import value_codec
from kindler.runtime.executor import Executor
from kindler.runtime.messages import Task

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

X = np.random.default_rng(0).random((12, 3), np.float32)
Y = X.sum(axis=1, keepdims=True)
NAMED = {"optimizer": "SGD", "lr": 0.5, "loss": "MSELoss"}


@pytest.fixture
def om(tmp_path: Path) -> Store:
    opened = Store(tmp_path / "store")
    opened.models.put(torch.nn.Sequential(torch.nn.Linear(3, 1)), "line")
    return opened


def fit(om: Store, *data: Any, trusted: bool = False, **options: Any) -> Any:
    buffers = value_codec.encode([list(data), {**NAMED, **options}])
    task = Task(
        id="t", shelf="models", bucket="default", name="line", verb="fit", buffers=buffers, trusted=trusted
    )
    return Executor(om.store.url, trusted=trusted).run(task)


def weights(om: Store, name: str) -> Any:
    return om.models.get(name)[0].weight.detach().numpy()


def test_they_reach_the_groups_of_the_constructor_and_of_fit_without_trust(om: Store) -> None:
    history = fit(
        om, X, Y, epochs=3, batch_size=4, steps_per_epoch=2, validation_split=0.25, validation_freq=3,
        clip_norm=1e-6, accumulation_steps=2, workers=1, device="cpu", precision="bf16", seed=3,
    ).attributes["history"]  # fmt: skip

    assert [row["steps"] for row in history] == [2, 2, 2]
    assert [row.get("val_num_samples") for row in history] == [None, None, 3]
    moved = np.linalg.norm(weights(om, "line") - weights(om, "line@1"))
    assert 0 < moved <= 6 * 0.5 * 1e-6 * 1.5  # six clipped steps; weights are rounded


def test_weights_of_rows_and_classes_are_columns_of_it(om: Store) -> None:
    data = {"x": np.eye(3, dtype=np.float32), "y": np.arange(3), "w": np.array([0.0, 2.0, 1.0], np.float32)}
    om.models.put(torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False)), "line")
    for number, name in enumerate(("sample_weight_col", "weight_col"), start=3):
        options = {"loss": "CrossEntropyLoss", "class_weight": {1: 0.0}, name: "w"}
        version = fit(om, data, feature_cols="x", label_cols="y", **options)
        changed = weights(om, f"line@{number}") != weights(om, f"line@{number - 1}")
        assert version.number == number
        assert changed.any(axis=0).tolist() == [False, False, True]


@pytest.mark.filterwarnings("ignore:the loss is nan:RuntimeWarning")
def test_whoever_is_trusted_names_folders_and_what_to_do_about_nan(om: Store, tmp_path: Path) -> None:
    x = X.copy()
    x[5] = np.nan
    version = fit(
        om, x, Y, trusted=True, epochs=2, batch_size=4, shuffle=False, allow_nan=True, nan_loss="skip",
        model_dir=str(tmp_path / "run"), keep_checkpoints=1, log_dir=str(tmp_path / "logs"),
    )  # fmt: skip

    assert [row["skipped_steps"] for row in version.attributes["history"]] == [1, 1]
    assert np.isfinite(weights(om, "line")).all()
    (kept,) = [path.name for path in (tmp_path / "run").iterdir()]
    assert Estimator.latest_checkpoint(tmp_path / "run") == str(tmp_path / "run" / kept)
    assert any((tmp_path / "logs" / "train").iterdir())
    with pytest.raises(UntrustedError, match=r"keep_checkpoints=..., log_dir=..., model_dir="):
        fit(om, X, Y, model_dir="/tmp/x", keep_checkpoints=1, log_dir="/tmp/x")
