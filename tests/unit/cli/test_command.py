"""The `kindler` command."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from kindler import cli


def test_version_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: "1.2.3")

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "kindler 1.2.3\n"


def test_info_names_what_is_there_and_what_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(package: str) -> str:
        if package in ("torch", "mlflow"):
            raise metadata.PackageNotFoundError
        return "7.8.9" if package == "mlflow-skinny" else "4.5.6"

    monkeypatch.setattr(metadata, "version", version)

    assert cli.main(["info"]) == 0

    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(lines)[:5] == ["python", "kindler", "numpy", "pyarrow", "pyspark"]
    assert {"keras", "tensorflow", "jax", "transformers", "lightning", "java"} <= set(lines)
    assert (lines["pyspark"], lines["torch"], lines["mlflow"]) == ("4.5.6", "not installed", "7.8.9")
    assert lines["python"] == sys.version.split()[0]


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "info" in capsys.readouterr().out


def test_info_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kindler import cli; cli.main(['info']);"
        "sys.exit(bool({'pyspark', 'torch', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )

    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
