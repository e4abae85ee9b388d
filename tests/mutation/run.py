"""Mutation testing: which small errors in the code that decides would its unit tests miss?

    python -m tests.mutation.run                        # all targets, as `make mutation` does
    python -m tests.mutation.run outcome --most 20      # one of them, and 20 of its mutants

A mutant is killed if a test fails. Each runs in a fork of one warm process and imports the mutant in place of
the module: no file changes, and the limits on time and memory end whatever a mutant began.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

import tests.few_examples  # noqa: F401
from tests.mutation.mutants import ROOT, Mutant, mutants
from tests.mutation.targets import EQUIVALENT, TARGETS, Target

LEAST = 0.85  # of the mutants of each module
_MEMORY_BYTES, _CPU_S = 8 << 30, 600  # of a mutant that asks for ever more
_PYTEST = "-x -q -p no:cacheprovider -p no:unraisableexception -p pytest_timeout"


class _Instead(MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports a module from a text instead of its file."""

    def __init__(self, target: Target, source: str) -> None:
        super().__init__(target.module, str(ROOT / target.path))
        self._source = source

    def find_spec(self, fullname: str, *_: object) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self.path, "exec")


def _start(target: Target, source: str, folder: Path) -> int:
    """Run a target's tests on a text of its module in a child that leads a process group; returns its id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
        folder.mkdir()
        os.dup2(os.open(folder / "output", os.O_RDWR | os.O_CREAT), 1)
        os.dup2(1, 2)
        sys.meta_path.insert(0, _Instead(target, source))
        code = pytest.main([*_PYTEST.split(), f"--basetemp={folder / 'tmp'}", *target.tests])
        (folder / "modules").write_text(json.dumps([*sys.modules]))
    finally:
        os._exit(code)


def _end(pid: int) -> int:
    for kill in (os.killpg, os.kill):  # it may not lead its group yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _codes(target: Target, sources: Sequence[str], *, limit_s: float, jobs: int, folder: Path) -> list[int]:
    """The exit code of the tests of each text: 0 where all passed, negative where the limit ended them."""
    codes, running = [0] * len(sources), dict[int, tuple[int, int, float]]()
    todo = iter(enumerate(sources))
    try:
        while True:
            while len(running) < jobs and (job := next(todo, None)) is not None:
                number, source = job
                pid = _start(target, source, folder / f"{number}")
                running[os.pidfd_open(pid)] = (number, pid, time.monotonic() + limit_s)
            if not running:
                return codes
            next_end = min(deadline for *_, deadline in running.values())
            ended, _, _ = select.select([*running], [], [], max(0.0, next_end - time.monotonic()))
            late = [fd for fd, (*_, deadline) in running.items() if deadline <= time.monotonic()]
            for fd in {*ended, *late}:
                number, pid, _ = running.pop(fd)
                os.close(fd)
                codes[number] = _end(pid)
    finally:
        for fd, (_, pid, _) in running.items():
            os.close(fd)
            _end(pid)


def survivors(target: Target, *, jobs: int = 1, most: int = sys.maxsize) -> tuple[int, list[Mutant]]:
    """How many of a target's mutants were tried, and those that no test noticed."""
    with tempfile.TemporaryDirectory(prefix="kindler-mutation-") as path:
        folder = Path(path)
        original, begun = (ROOT / target.path).read_text(), time.monotonic()
        (code,) = _codes(target, [original], limit_s=600, jobs=1, folder=folder)
        if code:
            raise SystemExit(f"the tests of {target.path} fail:\n{(folder / '0/output').read_text()}")
        limit_s = 5 + 3 * (time.monotonic() - begun)
        # Everything but what may import the module: each child imports that anew, with its mutant.
        for name in json.loads((folder / "0/modules").read_text()):
            if name.partition(".")[0] not in (target.module.partition(".")[0], "tests", "conftest"):
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        gc.collect()
        gc.freeze()
        made = [m for m in mutants(target) if not m.change.startswith(tuple(EQUIVALENT))]
        made = made[:: -(-len(made) // most)]
        (folder / "0").rename(folder / "original")
        codes = _codes(target, [m.source for m in made], limit_s=limit_s, jobs=jobs, folder=folder)
        return len(made), [mutant for mutant, code in zip(made, codes, strict=True) if code == 0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*TARGETS, []], help="all, if none is named")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="mutants of a module that are tried")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the mutants
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they cost each mutant half a second
    settings.register_profile(
        "mutation",
        settings.get_profile("kindler"),
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutation")
    rows, left = [], list[str]()
    for name in options.names or TARGETS:
        begun = time.monotonic()
        count, missed = survivors(TARGETS[name], jobs=options.jobs, most=options.most)
        score = 1 - len(missed) / max(1, count)
        rows.append((name, count, count - len(missed), score, time.monotonic() - begun))
        left += [f"{mutant.place} {mutant.change}" for mutant in missed]
        sys.stderr.write(f"{name}: {count - len(missed)} of {count} killed\n")
    table = [
        f"| {name} | {count} | {killed} | {100 * score:.0f} | {seconds:.0f} |"
        for name, count, killed, score, seconds in rows
    ]
    head = ("| code | mutants | killed | % | seconds |", "|---|---:|---:|---:|---:|")
    sys.stdout.write("\n".join([*head, *table, "", *(left or ["No mutant survived."]), ""]))
    return int(any(score < LEAST for *_, score, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
