"""XShards of the local engine as what is trained on, judged and scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator, XShards
from kindler.errors import ConfigError, DataError
from tests import exact, shards_training

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(30, 3)).astype(np.float32)
Y = X.sum(1)


def linear(**options: Any) -> Estimator:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return Estimator.from_torch(
        **{"model": model, "optimizer": sgd, "loss": nn.MSELoss(), "workers": 2, **options}
    )


def weights(est: Estimator) -> list[float]:
    return [float(v) for p in est.get_model().parameters() for v in p.detach().ravel()]


@pytest.mark.parametrize("layout", shards_training.LAYOUTS)
def test_local_shards_are_trained_judged_and_scored_as_by_one_process(tmp_path: Path, layout: str) -> None:
    ends, data = shards_training.LAYOUTS[layout], exact.problem(shards_training.ROWS)
    shards = shards_training.shards_of(data, ends, "local")

    shards_training.assert_same_as_one_process(tmp_path, shards, ends, data)


def test_frames_dicts_of_columns_and_arrays_train_alike() -> None:
    frame = pd.DataFrame({"name": ["n"] * 30, "features": list(X), "label": Y})
    given = {
        "arrays": (X, Y),
        "frames": XShards.partition(frame, 4, engine="local"),
        "x and y": XShards.partition({"x": X.astype("float64"), "y": Y}, 3, engine="local"),
        "columns": XShards.partition({"features": X, "label": Y, "id": np.arange(30)}, 3, engine="local"),
    }
    found = {}
    for name, data in given.items():
        est = linear()
        est.fit(data, epochs=2, batch_size=30, verbose=0)
        found[name] = weights(est)

    for name in given:
        assert found[name] == pytest.approx(found["arrays"], abs=1e-6), name


def test_frames_get_a_column_keep_their_index_and_stay_as_they_were() -> None:
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2]}, index=np.arange(30) * 2)
    frames = [frame[:10], frame[10:10], frame[10:]]
    shards = XShards.from_shards(frames, engine="local")
    est = linear()

    scored = est.predict(
        shards,
        feature_cols=["a", "b", "c"],
        columns=Columns(stack_features=True),
        output_cols="score",
        verbose=0,
    )

    with torch.no_grad():
        expected = est.get_model()(torch.from_numpy(X)).numpy()
    found = scored.to_pandas()
    assert found.index.tolist() == frame.index.tolist()
    np.testing.assert_allclose(np.stack(found["score"]), expected, atol=1e-6)
    assert [list(shard) for shard in scored.collect()] == [["a", "b", "c", "score"]] * 3
    assert list(shards.first()) == ["a", "b", "c"]


class Spoils(nn.Module):
    """Writes into its inputs and has two outputs."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.mul_(2)
        return x, x.sum(1)


def test_several_outputs_have_their_names_and_inputs_are_not_changed() -> None:
    shards = XShards.partition({"x": X}, 2, engine="local")

    scored = Estimator.from_torch(model=Spoils(), workers=2).predict(shards, verbose=0)

    for before, after in zip(np.array_split(X, 2), scored.collect(), strict=True):
        assert list(after) == ["x", "prediction_0", "prediction_1"]
        np.testing.assert_array_equal(after["x"], before)
        np.testing.assert_array_equal(after["prediction_0"], before * 2)


def test_arrays_alone_become_arrays_of_predictions() -> None:
    scored = linear().predict(XShards.partition(X, 2, engine="local"), verbose=0)
    assert [shard.shape for shard in scored.collect()] == [(15, 1), (15, 1)]


def test_a_model_of_columns_with_other_names_scores_the_x_of_shards() -> None:
    est = linear()
    given = {"image": X, "target": Y}
    est.fit(
        given, feature_cols="image", label_cols="target", columns=Columns(shapes={"image": (3,)}), verbose=0
    )
    shards = XShards.partition({"x": X, "y": Y}, 2, engine="local")

    assert est.evaluate(shards, verbose=0)["num_samples"] == 30
    assert len(est.predict(shards, verbose=0).first()["prediction"]) == 15


def test_an_error_of_the_model_names_the_shard() -> None:
    shards = XShards.from_shards([{"x": X}, {"x": np.full((2, 3), np.nan, np.float32)}], engine="local")

    with pytest.raises(ValueError, match="no numbers") as caught:
        Estimator.from_torch(model=Picky()).predict(shards, verbose=0)
    assert caught.value.shard == 1  # type: ignore[attr-defined]


class Picky(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("no numbers")
        return x


def test_shards_that_no_model_takes_are_described_before_a_worker_starts() -> None:
    with pytest.raises(
        ConfigError,
        match=r"shard 0 is a dict with 'x': a list of 2 \(int\)(.|\n)*to make dicts",
    ):
        linear().fit(XShards.from_shards([{"x": [1, 2], "y": "text"}], engine="local"), verbose=0)
    with pytest.raises(ConfigError, match="the data already has"):
        linear().predict(XShards.partition({"x": X, "prediction": Y}, 2, engine="local"), verbose=0)
    with pytest.raises(DataError, match="no rows"):
        linear().fit(XShards.from_shards([{"x": X[:0], "y": Y[:0]}], engine="local"), verbose=0)


def test_shards_of_another_structure_are_named() -> None:
    odd = XShards.from_shards([{"x": X, "y": Y}, {"x": X[:, :2], "y": Y}], engine="local")
    with pytest.raises(DataError, match=r"shard 1 has float32 of shape \(2,\), and shard 0 has"):
        linear().fit(odd, verbose=0)
    frames = XShards.from_shards(
        [pd.DataFrame({"a": [1.0], "b": [1.0]}), pd.DataFrame({"a": [1.0]})], engine="local"
    )
    with pytest.raises(DataError, match="column 'b'(.|\n)*shard 1"):
        linear().fit(frames, feature_cols="a", label_cols="b", verbose=0)
    mixed = XShards.from_shards([{"x": X, "y": Y}, pd.DataFrame({"x": [1.0]})], engine="local")
    with pytest.raises(DataError, match="shard 1 is a DataFrame, but shard 0 is a dict"):
        linear().fit(mixed, verbose=0)


def test_a_value_that_cannot_be_used_is_found_in_its_shard() -> None:
    x = X.copy()
    x[20, 1] = np.nan
    with pytest.raises(DataError, match="row 5 of shard 1"):
        linear().fit(XShards.partition({"x": x, "y": Y}, 2, engine="local"), verbose=0)
