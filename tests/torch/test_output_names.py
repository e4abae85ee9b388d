"""Outputs that a model returns in a dict keep their names, in whatever form the data comes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kindler import Estimator, XShards
from kindler.errors import ConfigError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

X = np.random.default_rng(1).normal(size=(10, 3)).astype(np.float32)


class TwoNamed(torch.nn.Module):
    def __init__(self, fickle: bool = False) -> None:
        super().__init__()
        self.line, self.fickle = torch.nn.Linear(3, 2), fickle

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.line(x)
        named = {"low": made[:, 0], "all": made}
        return named if not self.fickle or len(x) == 4 else dict(reversed(named.items()))


@pytest.fixture(scope="module")
def scorer() -> Estimator:
    torch.manual_seed(0)
    return Estimator.from_torch(model=TwoNamed(), workers=2, engine="local")


@pytest.fixture(scope="module")
def expected(scorer: Estimator) -> np.ndarray:
    with torch.no_grad():
        return scorer.get_model()(torch.from_numpy(X))["all"].numpy()


def same(found: object, expected: np.ndarray) -> bool:
    return np.asarray(list(found), dtype=np.float32) == pytest.approx(expected, abs=1e-6)  # type: ignore[call-overload]


def test_dicts_arrays_frames_and_tables_get_columns_of_those_names(
    scorer: Estimator, expected: np.ndarray
) -> None:
    as_array = scorer.predict(X, batch_size=4)
    as_dict = scorer.predict({"x": X})
    as_frame = scorer.predict(pd.DataFrame({"x": list(X)}), feature_cols="x")
    as_table = scorer.predict(pa.table({"x": list(X)}), feature_cols="x")

    assert list(as_array) == ["low", "all"]
    assert list(as_dict) == list(as_frame.columns) == as_table.column_names == ["x", "low", "all"]
    for found in (as_array, as_dict, as_frame):
        assert same(found["low"], expected[:, 0])
        assert same(found["all"], expected)
    assert same(as_table["low"].to_pylist(), expected[:, 0])


def test_files_and_shards_do_too(scorer: Estimator, expected: np.ndarray, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": list(X)}), tmp_path / "in.parquet")
    scorer.predict(str(tmp_path / "in.parquet"), feature_cols="x", output_path=tmp_path / "out", verbose=0)
    written = pq.read_table(tmp_path / "out")
    (first, second) = scorer.predict(XShards.partition({"x": X}, num_shards=2), verbose=0).collect()

    assert written.column_names == ["x", "low", "all"]
    assert same(written["all"].to_pylist(), expected)
    assert same([*first["low"], *second["low"]], expected[:, 0])


def test_output_cols_names_them_otherwise(scorer: Estimator, expected: np.ndarray) -> None:
    found = scorer.predict({"x": X}, output_cols=["a", "b"])

    assert same(found["a"], expected[:, 0])
    assert same(found["b"], expected)


def test_a_name_that_the_data_has_is_refused(scorer: Estimator, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the data already has \['low'\]"):
        scorer.predict({"x": X, "low": X}, feature_cols="x")
    pq.write_table(pa.table({"x": list(X), "low": range(10)}), tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match=r"the data already has \['low'\]"):
        scorer.predict(
            str(tmp_path / "in.parquet"), feature_cols="x", output_path=tmp_path / "out", verbose=0
        )


def test_a_model_that_changes_the_names_of_its_outputs_is_refused() -> None:
    fickle = Estimator.from_torch(model=TwoNamed(fickle=True), workers=1, engine="local")

    with pytest.raises(ConfigError, match="must have the same names in every batch"):
        fickle.predict(X, batch_size=4)
