"""What follows a run from the driver: told before workers start, after each epoch, and at the end.

Callbacks run on workers; a watcher stays where `fit` was called, and goes on through lost workers. Which
epochs it is told of, and with which end, is decided here; what it makes of them is its own business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

__all__ = ["Ending", "Watch", "Watcher", "divided"]

Ending = Literal["finished", "failed", "killed"]


class Watcher:
    """Override all of them; `fit` finds these among its callbacks, whatever the model's framework."""

    def run_begins(self, facts: Mapping[str, Any]) -> None:
        """Before any worker starts, with what `fit` was told; an error ends the run here."""

    def workers_join(self, workers: int) -> None:
        """Once so many workers are there; again after some were lost."""

    def epoch_ends(self, row: Mapping[str, Any]) -> None:
        """After each epoch, with its row of the history; once, also if it is trained again."""

    def run_ends(self, ending: Ending, error: BaseException | None, estimator: Any) -> None:
        """At the end; `estimator` has the trained model if the ending is "finished"."""


def divided(callbacks: Sequence[Any] | None) -> tuple[list[Watcher], list[Any]]:
    """The watchers among the callbacks, and the others."""
    given = list(callbacks or ())
    watchers = [item for item in given if isinstance(item, Watcher)]
    return watchers, [item for item in given if not isinstance(item, Watcher)]


class Watch:
    """Tells the watchers of one run."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = tuple(watchers)
        self._epoch = 0

    @contextmanager
    def over(self, estimator: Any, facts: Mapping[str, Any]) -> Iterator[Watch]:
        """The run: what begins is told of its end, however it ends."""
        with ExitStack() as begun:
            for watcher in self._watchers:
                watcher.run_begins(facts)
                begun.push(partial(_farewell, watcher, estimator))
            yield self

    def report(self, fields: Mapping[str, Any]) -> None:
        """What was reported; other reports than "gang" and "epoch" are nothing to this."""
        if fields["name"] == "gang":
            for watcher in self._watchers:
                watcher.workers_join(int(fields["workers"]))
        elif fields["name"] == "epoch":
            self.finish([fields["row"]])

    def finish(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Tell of the epochs among these that were not told of yet, as where workers cannot reach us."""
        for row in rows:
            if int(row["epoch"]) > self._epoch:
                self._epoch = int(row["epoch"])
                for watcher in self._watchers:
                    watcher.epoch_ends(row)


def _farewell(
    watcher: Watcher,
    estimator: Any,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: Any,
) -> None:
    watcher.run_ends(_ending(error), error, estimator)


def _ending(error: BaseException | None) -> Ending:
    if error is None:
        return "finished"
    return "failed" if isinstance(error, Exception) else "killed"
