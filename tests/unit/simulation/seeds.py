"""Runs simulated worlds by their seeds. `python -m tests.unit.simulation.seeds gang 17` shows one.

A run says what it saw in its trace; the same seed has the same trace, in any process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from tests.unit.simulation.brokers import substitutes
from tests.unit.simulation.fits import FitRun
from tests.unit.simulation.fits import substitutes as of_training
from tests.unit.simulation.gangs import GangRun
from tests.unit.simulation.processes import simulation
from tests.unit.simulation.tasks import TaskEngine, TaskRun
from tests.unit.simulation.world import World, installed

_SHOWN = 150  # lines of a trace, the last ones


class Run(Protocol):
    world: World

    def run(self) -> None: ...


RUNS: dict[str, Callable[[int], Run]] = {"gang": GangRun, "fit": FitRun, "tasks": TaskRun}


@contextmanager
def ready() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        with simulation(), installed(*substitutes(TaskEngine), *of_training()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def first_failure(kind: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first seed that fails, with how to run it alone, the error and the end of its trace."""
    with ready():
        for seed in seeds:
            run = RUNS[kind](seed)
            try:
                run.run()
            except Exception as exc:
                trace = "\n".join(run.world.trace[-_SHOWN:])
                again = f"python -m tests.unit.simulation.seeds {kind} {seed}"
                return seed, f"seed={seed}: {exc!r}\nAgain: {again}\n{trace}"
    return None


def main() -> None:
    kind, seed = sys.argv[1], int(sys.argv[2])
    with ready():
        run = RUNS[kind](seed)
        try:
            run.run()
        finally:
            sys.stdout.write("\n".join(run.world.trace) + "\n")


if __name__ == "__main__":
    main()
