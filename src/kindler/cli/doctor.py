"""`kindler doctor`: what this machine, and a Spark cluster, have and lack."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from kindler.cli.machine_checks import FRAMEWORKS, Check, free_space, machine_checks
from kindler.errors import ConfigError, KindlerError

_MARKS = {"ok": "ok", "warn": "warning", "fail": "FAILED"}
_LOOK_S = 0.25
_PACKAGES = ("kindler", "numpy", "pyarrow", "cloudpickle", *FRAMEWORKS)


def add_commands(commands: Any) -> None:
    """Add `kindler doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine and a Spark cluster, and say what to do",
        description="Checks this machine and, with --master, the executors of a cluster. Exits with 1 if"
        " something must be mended.",
    )
    parser.add_argument("--master", metavar="URL", help="a Spark master or sc://host to check, too")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for executors to come (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_doctor)


def _doctor(chosen: argparse.Namespace) -> int:
    checks = list(machine_checks())
    if chosen.master is not None:
        checks += _cluster(chosen.master, chosen.timeout)
    if chosen.json:
        print(json.dumps([check.as_dict() for check in checks], indent=2))
    else:
        for line in _lines(checks):
            print(line)
    return 1 if any(check.status == "fail" for check in checks) else 0


def _lines(checks: list[Check]) -> Iterator[str]:
    where = None
    for check in checks:
        if check.where != where:
            where = check.where
            yield "this machine" if where == "here" else where
        yield f"  {_MARKS[check.status]:<8} {check.name:<16} {check.found}"
        if check.advice:
            yield f"  {'':<8} {'':<16} -> {check.advice}"


def _cluster(master: str, timeout_s: float) -> list[Check]:
    from kindler.spark.session import init, stop

    try:
        spark = init(master)
    except KindlerError as exc:
        first, _, rest = str(exc).partition("\n")
        return [
            Check("spark", "fail", first, rest or "is the address right, and the cluster up?", where=master)
        ]
    except Exception as exc:  # noqa: BLE001 - Spark's own, of any kind: to be told, not raised
        first = str(exc).strip().partition("\n")[0][:300]
        return [Check("spark", "fail", first, "is the address right, and the cluster up?", where=master)]
    try:
        return list(_executors(spark, master, timeout_s))
    finally:
        stop()


def _executors(spark: Any, master: str, timeout_s: float) -> Iterator[Check]:
    from kindler.spark.executors import executor_pythons, is_dynamic, reach_driver, slots

    yield Check("spark", "ok", str(spark.version), where=master)
    deadline = time.monotonic() + timeout_s
    while not is_dynamic(spark) and not slots(spark):
        if time.monotonic() > deadline:
            advice = "are there free workers with enough cores and memory (spark.executor.memory)?"
            yield Check("executors", "fail", f"none came in {timeout_s:g} s", advice, master)
            return
        time.sleep(_LOOK_S)
    try:
        pythons = executor_pythons(spark, _PACKAGES)
    except ConfigError as exc:
        first, _, rest = str(exc).partition("\n")
        yield Check("executors", "fail", first, rest.removeprefix("Hint: "), master)
        return
    yield Check("executors", "ok", f"{slots(spark)} slots, {len(pythons)} Python(s)", where=master)
    complaint = reach_driver(spark)
    if complaint is None:
        yield Check("ports", "ok", "executors reach the driver", where=master)
    else:
        advice = "open a port range for RunSettings(port_range=...), or set spark.driver.host."
        yield Check("ports", "fail", complaint, advice, master)
    for found in pythons:
        yield from _one_python(found)


def _one_python(found: Any) -> Iterator[Check]:
    where = f"{found.host} ({found.executable})"
    yield Check("python", "ok", found.python, where=where)
    for complaint in found.complaints(_PACKAGES[:4]):
        advice = 'install it there, or: kindler.init(master, ship="venv")'
        yield Check(complaint.partition(" ")[0], "fail", complaint, advice, where)
    for name, version in found.versions.items():
        if version is not None:
            yield Check(name, "ok", version or "installed", where=where)
    if not any(found.versions[name] is not None for name in FRAMEWORKS):
        yield Check("frameworks", "warn", "none", "install what your models are of, such as torch.", where)
    yield Check("gpus", "ok", str(len(found.gpus)) if found.gpus else "none", where=where)
    yield free_space("shared memory", "/dev/shm", found.free_shm, where)
    yield free_space("temporary files", "its temporary folder", found.free_temp, where)
