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
    "catalog": Target(  # what opens it, and PostgreSQL's part, is for the real databases of tests/store
        "src/kindler/store/catalog.py",
        ("tests/unit/store/test_catalog.py",),
        only=(
            *_methods(
                "Catalog", "publish find versions history hashes users newest names all_tags buckets drop"
            ),
            *_methods("Catalog", "tag untag tags unneeded _listed _next _move _tags _needed"),
            *("_entries", "_read_version", "_behind"),
        ),
    ),
    "keys": Target("src/kindler/store/keys.py", ("tests/unit/store/test_keys.py",)),
    "authorization": Target("src/kindler/serve/auth.py", ("tests/unit/serve/test_auth.py",)),
}

# How the change of such mutants begins, and why no test can tell them from the code.
EQUIVALENT = {
    "AgreedSteps.close: self._through = None -> pass": "what is closed twice stays closed",
    "AgreedSteps._pass: last = int(totals.nonzero()[0][-1]) if over and is_epoch and totals.any() else -1 ->"
    " last = int(totals.nonzero()[0][-1]) if over and is_epoch and totals.any() else -2": "no step has that",
    "AgreedSteps._pass: made += 1 -> made": "only none or some count",
    "AgreedSteps._pass: window = min(2 * window, _WINDOW) # the first step does not wait for many -> window"
    " = min(3": "how many steps are agreed on at a time",
    "NumberedSteps.__init__: self._number = self._place = self._given = 0": "the first step sets them",
    "NumberedSteps.own_steps: return range(self._own or 0) -> return range(self._own or -1)": "none",
    "AgreedSteps._pass: parts.close() -> pass": "the garbage collector closes it",
    "AgreedSteps._global_rows: own = np.zeros(_WINDOW + 1, np.int64) -> own = np.zeros(_WINDOW + 2,": (
        "one zero more travels"
    ),
    "NumberedSteps.__init__: uneven = self._own is None or source.whole or self._own < (self.steps or 0) ->"
    " uneven = self._own is None or source.whole or self._own < (self.steps or 1)": "steps are known by then",
    'RowRandom.__init__: "buffer_pos": 4, -> "buffer_pos": 5,': "an empty buffer, however far behind its end",
    "Authorizer.authorize: if self._clock() - self._read_at > _FRESH_S: -> if (self._clock() - self._read_at"
    " >= ": "the first of two looks, which only spares a lock",
    "Keys.add: name = secrets.token_hex(4)": "ids may have any length",
    "Keys.find: return _read(rows[0]) if rows else None -> return _read(rows[-1])": "an id has one row",
    '_tokens: yield "folders", lambda _: True': "folders do not ask which characters they accept",
    "_tokens: elif end > 0: -> elif end": "a set ends behind its second character, or at -1",
    "_tokens: elif end > 0: -> elif (end >= 0)": "likewise",
    "Catalog.publish: .limit(1) -> .limit(2)": "of which the first is taken",
    "Catalog.drop: unneeded &= _file.first.between(before.scalar_subquery() + 1, number) -> unneeded |=": (
        "spares looks at files that are needed anyway"
    ),
    "Catalog._listed: query = query.where(_object.name.startswith(prefix, autoescape=True), name <": (
        "the end of the names that are looked at, not of those that match"
    ),
    "Catalog._listed: if limit is None or count is None or len(items) >= limit or len(rows) < count: -> if"
    " limit is None or count is None or (len(items) > limit)": "reads one page more, and shows none of it",
    "Catalog._listed: after, count = rows[-1].name, 4 * count -> after, count = rows[-1].name,": (
        "how much is read at a time"
    ),
    '_behind: return prefix[:-1] + ("\\ue000" if 0xD800 <= code < 0xE000 else chr(code)) # UTF-8 has no'
    ' surrogates -> return prefix[:-1] + ("\\ue000" if (55296 <= code <= 57344)': "then code is 0xE000",
    ": _REMEMBERED": "how much is kept",
    "_compiled.step: if len(known) < _REMEMBERED:": "how much is kept",
    "_compiled.step: known[positions, char] = following -> pass": "computes it again",
}
