"""`kindler doctor` on this machine; with a cluster, in tests/spark_programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest

from kindler import cli
from kindler.cli import doctor as doctors
from kindler.cli.doctor import free_space

Doctor = Callable[..., tuple[int, dict[str, dict[str, str]]]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    def run() -> tuple[int, dict[str, dict[str, str]]]:
        status = cli.main(["doctor", "--json"])
        return status, {check["name"]: check for check in json.loads(capsys.readouterr().out)}

    return run


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    asked = metadata.version

    def version(package: str) -> str:
        if package not in versions:
            return asked(package)
        found = versions[package]
        if found is None:
            raise metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(metadata, "version", version)


def test_it_names_what_is_there(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    status, checks = doctor()

    assert status == (1 if any(check["status"] == "fail" for check in checks.values()) else 0)
    assert {"python", "kindler", "pyspark", "java", "gpus", "cores", "ports", "open files"} <= set(checks)
    assert {"shared memory", "temporary files"} <= set(checks)
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr().out.startswith("this machine\n  ok       python ")


def test_an_old_pyspark_must_be_mended_and_the_exit_status_says_so(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, pyspark="3.3.2")

    status, checks = doctor()

    assert status == 1
    assert checks["pyspark"]["status"] == "fail"
    assert checks["pyspark"]["found"] == "3.3.2 is too old: Kindler needs Spark 3.5 or newer."
    assert checks["pyspark"]["advice"] == "pip install 'pyspark>=3.5'"


def test_without_spark_and_frameworks_it_says_what_to_install_and_does_not_fail(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, pyspark=None)
    monkeypatch.setattr(doctors, "find_spec", lambda name: None)

    def no_java(**options: Any) -> None:
        raise doctors.JavaNotFoundError("Spark needs Java.\n  PATH: none\nHint: pip install it")

    monkeypatch.setattr(doctors, "find_java", no_java)

    status, checks = doctor()

    assert status == 0
    assert "pip install 'kindler[spark,java]'" in checks["pyspark"]["advice"]
    assert "kindler[torch]" in checks["frameworks"]["advice"]
    assert (checks["java"]["status"], checks["java"]["advice"]) == ("warn", "pip install it")


def test_gpus_that_torch_cannot_use_are_told(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, torch="2.13.0+cpu")
    monkeypatch.setattr(doctors, "machine_gpus", lambda: ["0", "1"])

    assert doctor()[1]["gpus"]["found"] == "2, but torch cannot use them"


@pytest.mark.parametrize(
    ("path", "free", "status", "advice"),
    [
        ("/dev/shm", 64 << 20, "warn", "--shm-size"),
        ("/dev/shm", 8 << 30, "ok", ""),
        ("/tmp", 1 << 20, "warn", "TMPDIR"),
        ("/tmp", None, "fail", "let this user write"),
    ],
)
def test_little_room_has_an_advice(path: str, free: int | None, status: str, advice: str) -> None:
    check = free_space("room", path, free)

    assert (check.status, advice in check.advice) == (status, True)
