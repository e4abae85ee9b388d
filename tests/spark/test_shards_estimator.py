"""XShards of the Spark engine as what is trained on, judged and scored."""

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

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]

X = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
Y = X.sum(1)


def linear(**options: Any) -> Estimator:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return Estimator.from_torch(model=model, optimizer=sgd, loss=nn.MSELoss(), workers=2, **options)


def fitted(data: Any, **options: Any) -> list[float]:
    est = linear(**options)
    history = est.fit(data, epochs=2, batch_size=30, verbose=0)
    assert history["num_samples"] == [30, 30]
    return [float(v) for p in est.get_model().parameters() for v in p.detach().ravel()]


@pytest.mark.parametrize("layout", shards_training.LAYOUTS)
def test_shards_on_spark_are_trained_judged_and_scored_as_by_one_process(
    spark: Any, tmp_path: Path, layout: str
) -> None:
    ends, data = shards_training.LAYOUTS[layout], exact.problem(shards_training.ROWS)
    shards = shards_training.shards_of(data, ends, "spark")

    shards_training.assert_same_as_one_process(tmp_path, shards, ends, data)


def test_every_home_engine_and_kind_of_shard_gives_the_same_weights(spark: Any) -> None:
    frame = pd.DataFrame({"features": list(X), "label": Y, "word": ["w"] * 30})
    there, here = (XShards.partition({"x": X, "y": Y}, 3, engine=engine) for engine in ("spark", "local"))
    found = {
        "spark shards": fitted(there),
        "spark shards, local engine": fitted(there, engine="local"),
        "local shards, spark engine": fitted(here, engine="spark"),
        "frames": fitted(XShards.partition(frame, 4, engine="spark")),
        "from a DataFrame": fitted(XShards.from_spark_df(spark.createDataFrame(frame))),
    }

    expected = fitted((X, Y), engine="local")
    for name, weights in found.items():
        assert weights == pytest.approx(expected, abs=1e-6), name


class Kinds(nn.Module):
    """Says by its output what dtype its input has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names = [torch.uint8, torch.float32, torch.int32, torch.bool]
        return torch.full((len(x),), names.index(x.dtype))


@pytest.mark.parametrize(("dtype", "number"), [("uint8", 0), ("float64", 1), ("int32", 2), ("bool", 3)])
def test_the_model_gets_the_dtypes_that_arrays_would_have(spark: Any, dtype: str, number: int) -> None:
    values = np.arange(4).astype(dtype)
    est = Estimator.from_torch(model=Kinds())

    arrays = est.predict(XShards.partition({"x": values}, 2), verbose=0)
    frames = est.predict(XShards.partition(pd.DataFrame({"x": values}), 2), feature_cols="x", verbose=0)

    assert np.concatenate([shard["prediction"] for shard in arrays.collect()]).tolist() == [number] * 4
    assert frames.to_pandas()["prediction"].tolist() == [number] * 4


def test_frames_are_scored_where_they_are_and_empty_ones_stay(spark: Any) -> None:
    frame = pd.DataFrame({"features": list(X), "word": list("abc") * 10})
    shards = XShards.from_shards([frame[:10], frame[10:10], frame[10:]])
    est = linear()

    scored = est.predict(shards, feature_cols="features", verbose=0)

    found = scored.collect()
    assert (scored.engine, [len(shard) for shard in found]) == ("spark", [10, 0, 20])
    assert [list(shard) for shard in found] == [["features", "word", "prediction"]] * 3
    whole = scored.to_pandas()
    assert whole["word"].tolist() == frame["word"].tolist()
    np.testing.assert_allclose(np.stack(whole["prediction"]), est.predict(X), atol=1e-6)


def test_a_value_that_cannot_be_used_is_an_error_without_a_spark_stack(spark: Any) -> None:
    x = X.copy()
    x[20, 1] = np.nan
    with pytest.raises(DataError, match="column 'x', row 5 of partition 1"):
        linear().fit(XShards.partition({"x": x, "y": Y}, 2), verbose=0)


@pytest.mark.parametrize("engine", ["local", "spark"])
def test_x_and_y_of_shards_validate_beside_a_frame_whose_columns_have_other_names(
    spark: Any, engine: str
) -> None:
    frame = spark.createDataFrame(pd.DataFrame({"sizes": list(X), "price": Y}))
    shards = XShards.partition({"x": X, "y": Y}, 3, engine=engine)
    est = linear()

    history = est.fit(
        frame,
        1,
        30,
        "sizes",
        "price",
        validation_data=shards,
        columns=Columns(shapes={"price": (1,)}),
        verbose=0,
    )

    model = est.get_model()
    with torch.no_grad():
        expected = float(nn.functional.mse_loss(model(torch.tensor(X)), torch.tensor(Y)[:, None]))
    assert history["val_loss"] == [pytest.approx(expected, abs=1e-5)]
    assert history["val_num_samples"] == [30]


def test_shards_with_another_number_of_inputs_than_the_frame_are_refused(spark: Any) -> None:
    frame = spark.createDataFrame(pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "price": Y}))
    shards = XShards.partition({"x": X, "y": Y}, 3)

    with pytest.raises(ConfigError, match=r"validation_data: feature_cols=\['a', 'b'\] names 2 columns"):
        linear().fit(frame, 1, 30, ["a", "b"], "price", validation_data=shards, verbose=0)
