"""Which code is mutated, what tests it, and which mutants no test can kill."""

from __future__ import annotations

from dataclasses import dataclass

DATA, TRAIN = "tests/unit/data", "tests/unit/train"


@dataclass(frozen=True)
class Target:
    path: str
    tests: tuple[str, ...]  # arguments of pytest; the quickest first
    only: tuple[str, ...] = ()  # its classes and functions that decide; all of them, if there are none

    @property
    def module(self) -> str:
        return self.path.rpartition("src/")[2].removesuffix(".py").replace("/", ".")


def _methods(cls: str, names: str) -> tuple[str, ...]:
    return tuple(f"{cls}.{name}" for name in names.split())


TARGETS = {
    "row order": Target(
        "src/kindler/data/row_order.py",
        (f"{DATA}/test_steps.py", f"{DATA}/test_row_order.py", f"{DATA}/test_bucketing.py"),
    ),
    "steps of rows": Target(
        "src/kindler/data/batches.py",
        (f"{DATA}/test_batches.py",),
        only=_methods(
            "Batches",
            "stretch batch own_steps may_idle rows_of rows_of_all _stream_at _steps _order _own_before"
            " _own_sizes _bounds _own_until _until _bound",
        ),
    ),
    "steps of streams": Target(
        "src/kindler/train/loaders.py",
        (f"{TRAIN}/test_loaders.py",),
        only=("share", "Peeking", "AgreedSteps", "NumberedSteps"),
    ),
    "triggers": Target("src/kindler/train/triggers.py", (f"{TRAIN}/test_triggers.py",)),
    "triggers of checkpoints": Target(
        "src/kindler/train/options.py",
        (f"{TRAIN}/test_triggers.py", f"{TRAIN}/test_options.py"),
        only=_methods("FitOptions", "endless epochs_to_train _last_epoch validates writes_checkpoint"),
    ),
    "end of a run": Target(
        "src/kindler/train/loop.py",
        (f"{TRAIN}/test_triggers.py", f"{TRAIN}/test_loop.py"),
        only=("over_already", *_methods("Loop", "_ends end_epoch")),
    ),
    "metric names": Target("src/kindler/train/metric_names.py", (f"{TRAIN}/test_metric_names.py",)),
    "outcome": Target("src/kindler/engine/outcome.py", ("tests/unit/engine/test_outcome.py",)),
    "staleness": Target(
        "src/kindler/sync/parameter_server.py",
        ("tests/unit/sync/test_parameter_server.py",),
        only=("Outstanding", *_methods("ParameterServer", "_pull _applied _epoch _end_epoch")),
    ),
    "names in the store": Target("src/kindler/store/names.py", ("tests/unit/store/test_names.py",)),
    "catalog": Target("src/kindler/store/catalog.py", ("tests/unit/store/test_catalog.py",)),
    "keys": Target("src/kindler/store/keys.py", ("tests/unit/store/test_keys.py",)),
    "authorization": Target("src/kindler/serve/auth.py", ("tests/unit/serve/test_auth.py",)),
}

# By their change, each with the reason why no test can tell the mutant from the code.
EQUIVALENT = {
    "Authorizer.authorize: if self._clock() - self._read_at > _FRESH_S: -> if (self._clock() - self._read_at"
    " >= _FRESH_S):": "the first of two looks, which only spares a lock",
    "Keys.add: name = secrets.token_hex(4) -> name = secrets.token_hex(5)": "ids may have any length",
    "Keys.add: name = secrets.token_hex(4) -> name = secrets.token_hex(3)": "ids may have any length",
    "Keys.find: return _read(rows[0]) if rows else None -> return _read(rows[-1]) if rows else None": (
        "there is one row at most: the id is the primary key"
    ),
}
