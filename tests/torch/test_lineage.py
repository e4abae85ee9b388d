"""What made a model, kept by an estimator and by the versions of a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kindler import Columns, Estimator, Store, cli
from kindler.errors import ConfigError, DataError

COLUMNS: dict[str, Any] = {
    "feature_cols": ["a", "b"],
    "label_cols": "y",
    "columns": Columns(stack_features=True),
    "verbose": 0,
}


def net(config: dict[str, Any]) -> torch.nn.Module:
    return torch.nn.Linear(2, config["width"])


def estimator(**options: Any) -> Estimator:
    return Estimator.from_torch(
        net,
        optimizer=partial(torch.optim.Adam, lr=0.1),
        loss=torch.nn.MSELoss(),
        config={"width": 1, "api_key": "hidden"},
        **{"workers": 2, "seed": 3, **options},
    )


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.parquet", seed=0)


def write_rows(path: Path, *, seed: int) -> Path:
    x = np.random.default_rng(seed).normal(size=(60, 2)).astype("float32")
    pq.write_table(pa.table({"a": x[:, 0], "b": x[:, 1], "y": x.sum(1)}), path)
    return path


@pytest.fixture
def om(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_version_keeps_what_made_it(rows: Path, om: Store, capsys: pytest.CaptureFixture[str]) -> None:
    made = estimator()
    made.fit(str(rows), epochs=2, batch_size=8, **COLUMNS)
    om.models.put(made, "net", tag="prod")

    (fit,) = om.models.metadata("net").meta["lineage"]
    assert fit == made.lineage[0]
    (file,) = fit["data"]["files"]
    assert (file["path"], file["size"]) == (str(rows), rows.stat().st_size)
    assert (fit["rows"], fit["workers"], fit["seed"], fit["start"]) == (60, 2, 3, "a creator")
    assert fit["options"]["batch_size"] == 8
    assert fit["config"] == {"width": 1, "api_key": "***"}
    assert fit["code"][0]["name"].endswith("test_lineage.net")
    assert "torch.nn.Linear(2" in fit["code"][0]["source"]
    assert fit["packages"]["torch"] == torch.__version__
    assert sorted(fit["weights"]) == ["bias", "weight"]
    assert fit["metrics"]["loss"] == made.history[-1]["loss"]

    where = ("--store", str(rows.parent / "store"))
    assert cli.main(["models", "show", "net@prod", *where]) == 0
    text = capsys.readouterr().out
    assert "fit 1 of 1" in text
    assert str(rows) in text
    assert cli.main(["models", "show", "net", "--format", "json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["lineage"] == [fit]


def test_the_fingerprint_is_of_the_rows_and_of_their_order() -> None:
    x = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")

    def fingerprint(rows: Any) -> str:
        made = estimator(workers=1)
        made.fit({"x": rows, "y": rows.sum(1)}, batch_size=8, verbose=0)
        return str(made.lineage[0]["fingerprint"])

    first = fingerprint(x)
    assert fingerprint(x) == first
    assert fingerprint(x[::-1]) != first


def test_a_chain_of_fits_goes_through_files_and_versions(rows: Path, om: Store, tmp_path: Path) -> None:
    made = estimator(workers=1)
    made.fit(str(rows), **COLUMNS)
    made.save(tmp_path / "net.estimator")
    again = Estimator.load(tmp_path / "net.estimator", trusted=True)
    assert again.lineage == made.lineage
    assert again._lineage.recipe == made._lineage.recipe
    version = om.models.put(again, "net")

    again.copy().fit(str(rows), **COLUMNS)
    assert len(again.lineage) == 1
    again.fit(str(rows), **COLUMNS)
    assert [fit["start"] for fit in again.lineage] == ["a creator", "the fit before"]
    assert again.lineage[1]["parent"]["version"] == str(version)

    read = om.models.get("net", optimizer=torch.optim.Adam, loss=torch.nn.MSELoss(), workers=1)
    read.fit(str(rows), **COLUMNS)
    assert read.lineage[1]["parent"]["digest"] == version.digest


def test_weights_that_come_from_elsewhere_have_no_lineage(rows: Path, om: Store, tmp_path: Path) -> None:
    made = estimator(workers=1)
    made.fit(str(rows), **COLUMNS)
    made.save(tmp_path / "weights.pt")
    assert not om.models.put(made, "net").meta["changed_since"]

    with torch.no_grad():
        made.get_model().weight.zero_()
    assert om.models.put(made, "net").meta["changed_since"]
    made.load_weights(tmp_path / "weights.pt")
    assert made.lineage == []


@pytest.fixture
def stored(rows: Path, om: Store) -> Store:
    made = estimator()
    made.fit(str(rows), epochs=2, batch_size=8, validation_split=0.2, **COLUMNS)
    om.models.put(made, "net")
    return om


def test_a_fresh_process_reproduces_a_version_to_the_bit_and_names_a_changed_file(
    stored: Store, rows: Path
) -> None:
    def command(*options: str) -> subprocess.CompletedProcess[str]:
        asked = ["models", "reproduce", "net@1", "--store", str(rows.parent / "store"), *options]
        return subprocess.run(
            [sys.executable, "-m", "kindler", *asked], capture_output=True, text=True, timeout=120
        )

    refused = command()
    assert (refused.returncode, "trusted" in refused.stderr) == (1, True)
    done = command("--trusted")
    assert (done.returncode, done.stdout) == (
        0,
        "net@1 is equal to the bit: 2 arrays, loss, val_loss\n",
    ), done.stderr

    write_rows(rows, seed=1)
    changed = command("--trusted")
    assert changed.returncode == 1
    assert f"{rows} has changed" in changed.stderr
    rows.unlink()
    assert f"{rows} is gone" in command("--trusted").stderr


def test_another_seed_and_other_rows_are_named(stored: Store, rows: Path) -> None:
    other = stored.models.reproduce("net", trusted=True, seed=4)
    assert not other.equal
    assert set(other.weights) == {"weight", "bias"}
    assert "seed: 3 then, 4 now" in other.differences
    assert set(other.metrics) == {"loss", "val_loss"}

    changed = write_rows(rows.parent / "changed.parquet", seed=1)
    told = stored.models.reproduce("net", trusted=True, data=str(changed))
    assert any(line.startswith("fingerprint of the rows: ") for line in told.differences)


def test_rows_that_the_record_cannot_read_again_are_compared_by_their_fingerprint(om: Store) -> None:
    x = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
    made = estimator()
    made.fit((x, x.sum(1)), batch_size=8, verbose=0)
    made.fit((x, x.sum(1)), batch_size=8, verbose=0)
    om.models.put(made, "net")

    with pytest.raises(ConfigError, match=r"kind 'memory'.\nHint: pass data="):
        om.models.reproduce("net", trusted=True)
    assert om.models.reproduce("net", trusted=True, data=(x, x.sum(1))).equal


def test_a_delta_table_is_read_again_as_it_was(om: Store, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    x = np.random.default_rng(0).normal(size=(60, 2)).astype("float32")
    rows = pa.table({"a": x[:, 0], "b": x[:, 1], "y": x.sum(1)})
    deltalake.write_deltalake(str(tmp_path / "table"), rows)
    made = estimator()
    made.fit(str(tmp_path / "table"), batch_size=8, **COLUMNS)
    om.models.put(made, "net")

    deltalake.write_deltalake(str(tmp_path / "table"), rows, mode="append")
    assert om.models.reproduce("net", trusted=True).equal


def test_a_version_is_trained_again_on_newer_files_and_both_are_compared(
    om: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, holdout = tmp_path / "days", write_rows(tmp_path / "holdout.parquet", seed=9)
    folder.mkdir()
    os.utime(write_rows(folder / "1.parquet", seed=1), (0, 0))
    made = estimator()
    made.fit(str(folder), epochs=2, batch_size=8, **COLUMNS)
    om.models.put(made, "net", tag="prod")
    write_rows(folder / "2.parquet", seed=2)

    asked = ["models", "retrain", "net@prod", "--store", str(tmp_path / "store"), "--trusted"]
    assert cli.main([*asked, "--holdout", str(holdout), "--since", "2001-01-01"]) == 0
    assert "net@2 was trained by the recipe of net@1" in capsys.readouterr().out

    newer = om.models.metadata("net@candidate")
    assert newer.number == 2
    (fit,) = newer.meta["lineage"]
    assert [Path(file["path"]).name for file in fit["data"]["files"]] == ["2.parquet"]
    old, new = newer.attributes["on_holdout"]["loss"]
    assert old == pytest.approx(made.evaluate(str(holdout), verbose=0)["loss"])
    assert new != old
    om.models.split("net@prod", canary={newer.number: 0.1})
    with pytest.raises(DataError, match="none of the 2 files"):
        om.models.retrain("net@1", holdout=str(holdout), trusted=True, since=datetime.now())
