"""Hugging Face and ray datasets as data: trained on, judged and scored like the arrays they hold."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Estimator
from kindler.errors import ConfigError, DataError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 2, 3)).astype(np.float32)
Y = RANDOM.integers(0, 2, 40)
WHOLE = {"epochs": 2, "batch_size": len(X), "verbose": 0}


def estimator() -> Estimator:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return Estimator.from_torch(model=model, optimizer=sgd, loss=nn.CrossEntropyLoss(), workers=2)


def weights(est: Estimator) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel() for p in est.get_model().parameters()])


@pytest.fixture(scope="module")
def hugging() -> Any:
    return pytest.importorskip("datasets", reason="Hugging Face datasets are not installed")


def dataset(hugging: Any) -> Any:
    features = hugging.Features(
        {
            "x": hugging.Array2D((2, 3), "float32"),
            "y": hugging.ClassLabel(names=["no", "yes"]),
            "note": hugging.Value("string"),
        }
    )
    return hugging.Dataset.from_dict({"x": list(X), "y": Y, "note": ["-"] * len(X)}, features=features)


@pytest.fixture(scope="module")
def plain() -> Estimator:
    est = estimator()
    est.fit((X, Y), **WHOLE)
    return est


def test_a_hugging_face_dataset_trains_what_its_arrays_train(hugging: Any, plain: Estimator) -> None:
    est = estimator()
    history = est.fit(dataset(hugging), validation_data=dataset(hugging), **WHOLE)

    assert history["num_samples"] == [40, 40]
    np.testing.assert_allclose(weights(est), weights(plain), atol=1e-6)
    assert est.evaluate(dataset(hugging), verbose=0) == pytest.approx(plain.evaluate((X, Y), verbose=0))


def test_rows_picked_by_indices_are_scored_in_their_order(hugging: Any, plain: Estimator) -> None:
    picked = dataset(hugging).shuffle(seed=3).select(range(7))
    scored = plain.predict(picked, feature_cols="x")

    assert isinstance(scored, hugging.Dataset)
    assert scored.column_names == ["x", "y", "note", "prediction"]
    found = scored.with_format("numpy")
    np.testing.assert_allclose(found["prediction"][:], plain.predict(np.asarray(found["x"][:])), atol=1e-6)
    assert scored.features["y"].names == ["no", "yes"]
    with pytest.raises(ConfigError, match=r"already has \['y'\]"):
        plain.predict(picked, feature_cols="x", output_cols=["y"])


def test_splits_streams_and_transforms_are_refused_with_a_hint(hugging: Any) -> None:
    one = dataset(hugging)
    cases = {
        "splits \\['train'\\](.|\n)*data\\['train'\\]": hugging.DatasetDict({"train": one}),
        "IterableDataset(.|\n)*streaming": one.to_iterable_dataset(),
        "set_transform(.|\n)*map": one.with_transform(lambda rows: rows),
    }
    for told, data in cases.items():
        with pytest.raises(ConfigError, match=told):
            estimator().fit(data, **WHOLE)


def test_images_that_are_not_decoded_are_refused_with_a_hint(hugging: Any) -> None:
    pytest.importorskip("PIL")
    images = hugging.Dataset.from_dict(
        {"x": [np.zeros((2, 3, 3), np.uint8)] * 2, "y": [0, 1]},
        features=hugging.Features({"x": hugging.Image(), "y": hugging.Value("int64")}),
    )
    with pytest.raises(DataError, match="column 'x'(.|\n)*decode them first"):
        estimator().fit(images, **WHOLE)


# ray sets environment variables and writes into the home folder, so it gets a process and a home of its own.
RAY_PROGRAM = """
import sys, tempfile
import numpy as np, ray, torch
from kindler import Estimator
from torch import nn

folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder.name)
given = np.load(sys.argv[1])
data = ray.data.from_items([{"x": x, "y": int(y)} for x, y in zip(given["x"], given["y"])])
torch.manual_seed(1)
model = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
est = Estimator.from_torch(model=model, optimizer=sgd, loss=nn.CrossEntropyLoss(), workers=2)
est.fit(data, epochs=2, batch_size=40, verbose=0)
scored = est.predict(data, feature_cols="x")
ray.shutdown()
folder.cleanup()
weights = np.concatenate([p.detach().numpy().ravel() for p in est.get_model().parameters()])
outputs = np.stack(scored["prediction"].to_numpy())
np.savez(sys.argv[2], weights=weights, names=scored.column_names, prediction=outputs)
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_ray_dataset_trains_what_its_arrays_train(plain: Estimator, tmp_path: Path) -> None:
    np.savez(tmp_path / "given.npz", x=X, y=Y)
    done = subprocess.run(
        [sys.executable, "-c", RAY_PROGRAM, tmp_path / "given.npz", tmp_path / "found.npz"],
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]

    found = np.load(tmp_path / "found.npz")
    np.testing.assert_allclose(found["weights"], weights(plain), atol=1e-6)
    assert found["names"].tolist() == ["x", "y", "prediction"]
    np.testing.assert_allclose(found["prediction"], plain.predict(X), atol=1e-5)
