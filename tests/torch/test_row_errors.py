"""Rows that fail while others are scored: arrays, tables, files, transforms and text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator, Prepare, batched
from kindler.errors import ConfigError, DataError, RowErrorsWarning, RowsFailedError

pytestmark = pytest.mark.filterwarnings("ignore::kindler.errors.RowErrorsWarning")

ROWS = 300
BAD = [0, 17, 18, 150, 299]
GOOD = np.delete(np.arange(ROWS), BAD)
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")


class Picky(nn.Module):
    """Raises for rows that begin with more than 100, and writes to its input before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        if (x[:, 0] > 100).any():
            raise ValueError("too large")
        return self.layer(x)


def picky(**options: Any) -> Estimator:
    torch.manual_seed(0)
    return Estimator.from_torch(model=Picky(), **options)


def poisoned() -> np.ndarray[Any, Any]:
    x = X.copy()
    x[BAD, 0] = 1000
    return x


@pytest.fixture(scope="module")
def clean() -> np.ndarray[Any, Any]:
    return picky().predict(X.copy())


def failed_rows(errors: Any) -> list[int]:
    return [i for i, text in enumerate(errors) if text is not None]


@pytest.mark.parametrize("batch_size", [7, 64, 1024])
def test_a_row_that_the_model_raises_for_is_null_and_others_are_as_without_it(
    clean: Any, batch_size: int
) -> None:
    outputs, errors = picky().predict(poisoned(), batch_size, on_error="column")

    assert np.flatnonzero(np.isnan(outputs).all(axis=1)).tolist() == failed_rows(errors) == BAD
    np.testing.assert_allclose(outputs[GOOD], clean[GOOD], atol=1e-5)
    assert errors[17] == "ValueError: too large"


def test_null_adds_no_column_and_counts_in_a_warning() -> None:
    with pytest.warns(RowErrorsWarning, match=r"5 of 300 rows .*\n  ValueError: too large \(5 times\)"):
        outputs = picky().predict(poisoned(), on_error="null")

    assert np.isnan(outputs[:, 0]).sum() == 5


LISTS: list[Any] = [list(map(float, row)) for row in X]
LISTS[0], LISTS[17], LISTS[18], LISTS[150] = None, [1.0], [1.0, 2.0, 3.0, 4.0], [1.0, None, 2.0]
LISTS[299] = [float("nan"), 1.0, 2.0]
SAID = {
    0: "is null; missing values are not allowed.",
    17: "has another number of values than 3",
    18: "has another number of values than 3",
    150: "holds a null; missing values are not allowed.",
    299: "is NaN.",
}


@pytest.mark.parametrize("kind", [dict, pa.table, pd.DataFrame])
def test_values_that_cannot_be_read_are_their_rows_error_and_others_equal_to_the_bit(
    clean: Any, kind: Any
) -> None:
    scored = picky().predict(kind({"x": LISTS}), feature_cols="x", on_error="column")

    columns = scored.to_pydict() if isinstance(scored, pa.Table) else dict(scored)
    errors = list(columns["prediction_error"])
    assert {i: errors[i] for i in failed_rows(errors)} == {
        i: f"DataError: column 'x': {text}" for i, text in SAID.items()
    }
    alone = picky().predict(X[GOOD].copy())
    assert np.array_equal(np.stack([columns["prediction"][i] for i in GOOD]), alone)
    assert all(columns["prediction"][i] is None for i in BAD) or kind is dict


def test_a_wrong_first_row_does_not_make_the_others_wrong() -> None:
    rows = [[1.0], *[[0.0, 1.0, 2.0]] * 9]

    scored = picky().predict(pa.table({"x": rows}), feature_cols="x", on_error="null")

    assert [row is None for row in scored["prediction"].to_pylist()] == [True, *[False] * 9]


def test_a_nan_is_no_error_where_the_columns_allow_it() -> None:
    x = X.copy()
    x[5, 1] = np.nan

    outputs, errors = picky().predict(x, on_error="column", columns=Columns(allow_nan=True))

    assert failed_rows(errors) == []
    assert np.isnan(outputs[5]).all()


def transformed(row: dict[str, Any]) -> dict[str, Any]:
    if row["x"][0] > 100:
        raise KeyError("no such file")
    return {"x": row["x"] * 2}


@batched
def transformed_together(columns: dict[str, Any]) -> dict[str, Any]:
    if (columns["x"][:, 0] > 100).any():
        raise OSError("cannot be opened")
    return {"x": columns["x"] * 2}


def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    x = np.stack([row["x"] for row in rows])
    if (x[:, 0] > 100).any():
        raise RuntimeError("no tokens")
    return {"x": x * 2}


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (Prepare(transform=transformed), "KeyError: 'no such file'"),
        (Prepare(transform=transformed_together), "OSError: cannot be opened"),
        (Prepare(collate=collated), "RuntimeError: no tokens"),
    ],
)
def test_a_row_that_cannot_be_prepared_fails_alone(prepare: Prepare, text: str) -> None:
    est = Estimator.from_torch(model=nn.Identity(), prepare=prepare)

    outputs, errors = est.predict(poisoned(), 64, on_error="column")

    assert failed_rows(errors) == BAD
    assert errors[17] == text
    assert np.array_equal(outputs[GOOD], X[GOOD] * 2)


def test_outputs_of_whole_numbers_have_none_instead_of_nan() -> None:
    class Best(Picky):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            made = super().forward(x)
            return made.argmax(1), made

    scored = Estimator.from_torch(model=Best()).predict({"x": poisoned()}, on_error="column")

    assert failed_rows(scored["prediction_0_error"]) == BAD
    assert [scored["prediction_0"][i] for i in BAD] == [None] * 5
    assert np.isnan(scored["prediction_1"][BAD]).all()


def test_what_is_no_error_of_a_row_ends_the_call() -> None:
    with pytest.raises(ValueError, match="too large"):
        picky().predict(X + 1000, on_error="null")
    with pytest.raises(ValueError, match="too large"):
        picky().predict(poisoned())
    with pytest.raises(DataError, match="is null"):
        picky().predict({"x": [None] * 3}, feature_cols="x", on_error="null")
    with pytest.raises(ConfigError, match="nothere"):
        picky().predict(pa.table({"x": LISTS}), feature_cols="nothere", on_error="null")
    with pytest.raises(RowsFailedError, match="5 of 300 rows could not be scored, more than max_errors=4"):
        picky().predict(poisoned(), on_error="null", max_errors=4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_error": "ignore"}, "on_error must be 'raise', 'null' or 'column'; received 'ignore'"),
        ({"max_errors": 3}, "max_errors=3 has no effect with on_error='raise'"),
        ({"on_error": "null", "max_errors": -1}, "at least 0; received -1"),
        ({"on_error": "null", "max_errors": 0.5}, "whole number of at least 0; received 0.5"),
        ({"overwrite": True}, "no effect without output_path"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        picky().predict(X, **options)


# Files.


def written(folder: Path, x: Any = None) -> Path:
    path = folder / "in.parquet"
    values = list(poisoned()) if x is None else x
    pq.write_table(pa.table({"id": np.arange(len(values)), "x": values}), path, row_group_size=70)
    return path


def parts(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}


OPTIONS: dict[str, Any] = {"feature_cols": "x", "batch_size": 32, "verbose": 0}


@pytest.fixture(scope="module")
def scored_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    picky(workers=2).predict(written(folder), output_path=folder / "out", on_error="column", **OPTIONS)
    return folder


def test_files_have_the_rows_in_order_with_nulls_and_errors_in_parts(scored_files: Path, clean: Any) -> None:
    scored = pq.read_table(scored_files / "out")

    assert scored.column_names == ["id", "x", "prediction", "prediction_error"]
    assert scored["id"].to_pylist() == list(range(ROWS))
    assert failed_rows(scored["prediction_error"].to_pylist()) == BAD
    assert failed_rows(scored["prediction"].to_pylist()) == GOOD.tolist()
    np.testing.assert_allclose(scored["prediction"].drop_null().to_pylist(), clean[GOOD], rtol=1e-5)
    assert len(parts(scored_files / "out")) == 10
    assert (scored_files / "out" / "_SUCCESS").exists()


@pytest.mark.parametrize("workers", [1, 3])
def test_only_missing_parts_are_made_again_by_any_number_of_workers(scored_files: Path, workers: int) -> None:
    out = scored_files / "out"
    before = pq.read_table(out)
    for name in ("part-00002.parquet", "part-00003.parquet", "part-00009.parquet", "_SUCCESS"):
        (out / name).unlink()
    kept = parts(out)

    with pytest.warns(RowErrorsWarning, match="5 of 300 rows"):  # with those of the parts that were there
        again = picky(workers=workers).predict(
            scored_files / "in.parquet", output_path=out, on_error="column", **OPTIONS
        )

    assert Path(again) == out
    assert {name: parts(out)[name] for name in kept} == kept
    assert pq.read_table(out) == before
    assert (out / "_SUCCESS").exists()


@pytest.mark.parametrize("change", ["model", "input", "options"])
def test_parts_of_another_model_input_or_option_are_never_mixed(tmp_path: Path, change: str) -> None:
    path, out = written(tmp_path, list(X)), tmp_path / "out"
    picky(workers=1).predict(path, output_path=out, **OPTIONS)
    (out / "part-00001.parquet").unlink()
    est, options = picky(workers=1), OPTIONS
    if change == "model":
        torch.nn.init.zeros_(est.get_model().layer.bias)
    elif change == "input":
        written(tmp_path, list(X + 1))
    else:
        options = OPTIONS | {"batch_size": 16}

    with pytest.raises(ConfigError, match=rf"exists already, and it differs: {change}") as found:
        est.predict(path, output_path=out, **options)

    assert "Hint: choose a new folder, or pass overwrite=True" in str(found.value)
    assert "part-00001.parquet" not in parts(out)
    est.predict(path, output_path=out, overwrite=True, **options)
    expected = est.predict(pq.read_table(path), 16, "x", verbose=0)["prediction"].to_pylist()
    np.testing.assert_allclose(pq.read_table(out)["prediction"].to_pylist(), expected, rtol=1e-5)


def test_a_folder_of_somebody_else_is_not_touched_even_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "part-00000.parquet").write_text("mine")

    with pytest.raises(ConfigError, match="predict did not write it"):
        picky().predict(written(tmp_path), output_path=tmp_path / "out", overwrite=True, **OPTIONS)
    with pytest.raises(ConfigError, match="must not be in the folder of the input"):
        picky().predict(tmp_path / "in.parquet", output_path=tmp_path, **OPTIONS)

    assert (tmp_path / "out" / "part-00000.parquet").read_text() == "mine"


def test_too_many_errors_end_a_run_whose_parts_are_used_when_more_are_allowed(tmp_path: Path) -> None:
    path, out = written(tmp_path), tmp_path / "out"
    with pytest.raises(RowsFailedError, match="more than max_errors=3"):
        picky(workers=1).predict(path, output_path=out, on_error="null", max_errors=3, **OPTIONS)
    kept = parts(out)
    assert kept
    assert not (out / "_SUCCESS").exists()

    picky(workers=1).predict(path, output_path=out, on_error="null", max_errors=5, **OPTIONS)

    assert {name: parts(out)[name] for name in kept} == kept
    assert pq.read_table(out)["prediction"].null_count == 5
    with pytest.raises(RowsFailedError, match="5 of 300 rows"):  # nothing is left to score
        picky(workers=1).predict(path, output_path=out, on_error="null", max_errors=4, **OPTIONS)


PROGRAM = """
import os, sys
from pathlib import Path
import numpy as np, torch
from torch import nn
from kindler import Estimator

class Fatal(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        if os.path.exists("fatal") and (x[:, 0] > 100).any():
            os.kill(os.getpid(), 9)
        return self.layer(x)

if __name__ == "__main__":
    torch.manual_seed(0)
    est = Estimator.from_torch(model=Fatal(), workers=int(sys.argv[1]))
    est.predict("in.parquet", 32, "x", output_path="out", on_error="null", verbose=0)
"""


def test_a_row_that_kills_its_process_ends_the_run_and_a_new_program_goes_on(tmp_path: Path) -> None:
    x = X.copy()
    x[200, 0] = 1000
    written(tmp_path, list(x))
    (tmp_path / "main.py").write_text(PROGRAM)
    (tmp_path / "fatal").touch()

    def run(workers: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "main.py", str(workers)]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=dict(os.environ)
        )

    first = run(1)
    assert first.returncode == 1
    assert "WorkerLostError" in first.stderr
    kept = parts(tmp_path / "out")
    assert len(kept) == 6  # those before the row
    (tmp_path / "fatal").unlink()
    second = run(2)

    assert second.returncode == 0, second.stderr
    assert {name: parts(tmp_path / "out")[name] for name in kept} == kept
    assert pq.read_table(tmp_path / "out")["id"].to_pylist() == list(range(ROWS))
    assert json.loads((tmp_path / "out" / "_manifest.json").read_text())["parts"]["count"] == 10
