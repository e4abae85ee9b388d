"""Workers of the local engine that score with one model for all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kindler import Estimator


def test_two_workers_score_files_with_the_model_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINDLER_HOST_MODEL", "always")
    rows = np.random.default_rng(1).normal(size=(400, 4)).astype("float32")
    pq.write_table(pa.table({"x": list(rows)}), tmp_path / "rows.parquet", row_group_size=50)
    est = Estimator.from_torch(model=torch.nn.Linear(4, 1), workers=2, engine="local", device="cpu")
    expected = np.asarray(est.predict(rows)).reshape(-1)

    est.predict(
        tmp_path / "rows.parquet", feature_cols="x", output_path=tmp_path / "out", batch_size=64, verbose=0
    )

    found = pq.read_table(tmp_path / "out")["prediction"].to_pylist()
    np.testing.assert_allclose(np.ravel(found), expected, rtol=1e-6)
