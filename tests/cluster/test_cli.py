"""`kindler submit` and `kindler cluster`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kindler.cli import main

SCRIPT = """
import json, pathlib

def main_fun(args, ctx):
    seen = {"args": args, "role": ctx.role, "rows": 0}
    if args[0] == "--fed":
        feed = ctx.data_feed()
        while not feed.should_stop():
            seen["rows"] += len(feed.next_batch(10))
    pathlib.Path(args[1], f"{ctx.rank}.json").write_text(json.dumps(seen))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / f"program_{tmp_path.name}.py"
    path.write_text(SCRIPT)
    yield path
    sys.modules.pop(path.stem, None)


def test_a_script_runs_on_every_node_with_the_arguments_after_the_dashes(
    script: Path, tmp_path: Path
) -> None:
    words = [
        "submit",
        "--workers",
        "2",
        "--framework",
        "none",
        f"{script}:main_fun",
        "--",
        "--rate",
        str(tmp_path),
    ]

    assert main(words) == 0
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["role"] for one in seen] == ["chief", "worker"]
    assert seen[0]["args"] == ["--rate", str(tmp_path)]


def test_a_script_is_fed_parquet_files(script: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(100)}), tmp_path / "rows.parquet")
    feeding = ["--input-mode", "spark", "--train", str(tmp_path / "rows.parquet"), "--epochs", "3"]
    words = ["--framework", "none", f"{script}:main_fun", "--", "--fed", str(tmp_path)]

    assert main(["submit", *feeding, *words]) == 0
    assert json.loads((tmp_path / "0.json").read_text())["rows"] == 300


def test_what_cannot_run_is_said_without_a_traceback(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", f"{script}:missing"]) == 1
    assert "has no function 'missing'" in capsys.readouterr().err
    assert main(["submit", "nothing.py:main_fun"]) == 1
    assert "a file and a function in it" in capsys.readouterr().err
    assert main(["submit", "--input-mode", "spark", f"{script}:main_fun"]) == 1
    assert "--train" in capsys.readouterr().err
    assert main(["cluster", "status", "--folder", str(tmp_path)]) == 1
    assert "no cluster is running" in capsys.readouterr().out
    assert main(["cluster", "up", "--folder", str(tmp_path), "--memory", "much"]) == 1
    assert "memory='much'" in capsys.readouterr().err
