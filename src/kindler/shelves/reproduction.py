"""Training a stored version again from its record, and what differs.

The recipe is code, and read with trust only. Records may come from anyone who can write to the store.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import cloudpickle

from kindler.config import RunSettings
from kindler.data import parquet
from kindler.data.tables import Table
from kindler.engine.notices import sigterm_interrupts
from kindler.errors import ConfigError, DataError, UntrustedError
from kindler.estimator.estimator import Estimator
from kindler.estimator.inputs.contract import Input
from kindler.estimator.inputs.recognise import recognise
from kindler.estimator.lineage import FIT, files_record
from kindler.models.estimator import EstimatorKind
from kindler.models.kind import confined
from kindler.shelves.lineage import fits, one_line, plain_text
from kindler.shelves.shelf import Shelf
from kindler.store import Version, VersionStore
from kindler.temporary import Folder
from kindler.train.callbacks import DriverCallbackList
from kindler.train.goodput import RunClock
from kindler.train.metric_names import BOOKKEEPING

_NAMED = 10  # of what differs in many places


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A version that was trained again, compared with the stored one.

    Attributes:
        version: The version.
        estimator: The estimator that was trained now.
        differences: What it was made from that differs, a sentence each: a package, the seed, the rows.
        weights: The names of the arrays that are not equal to the bit.
        metrics: The metrics that differ, with the values then and now.
    """

    version: Version
    estimator: Estimator = field(repr=False)
    differences: tuple[str, ...]
    weights: tuple[str, ...]
    metrics: Mapping[str, tuple[Any, Any]]

    @property
    def equal(self) -> bool:
        """Whether weights and metrics are the same to the bit."""
        return not self.weights and not self.metrics

    def __str__(self) -> str:
        kept = _last(self.version)
        if self.equal:
            compared = [f"{len(kept['weights'])} arrays", *(kept.get("metrics") or ())]
            lines = [f"{self.version} is equal to the bit: {', '.join(compared)}"]
        else:
            lines = [f"{self.version} differs"]
        lines += self.differences
        if self.weights:
            lines.append(
                f"weights: {len(self.weights)} of {len(kept['weights'])} arrays, {_few(self.weights)}"
            )
        lines += [f"metric {name}: {then} then, {now} now" for name, (then, now) in self.metrics.items()]
        return "\n  ".join(plain_text(line) for line in lines)


def reproduce(
    store: VersionStore,
    version: Version,
    *,
    trusted: bool,
    data: Any = None,
    validation_data: Any = None,
    seed: int | None = None,
    workers: int | None = None,
) -> Reproduction:
    """See `Models.reproduce`."""
    fit = _last(version)
    _check_recipe(version, trusted)
    _check_repeatable(version, fit)
    rows = _rows(fit, "data", data)
    held_out = _rows(fit, "validation", validation_data) if validation_data is not None else None
    share = fit["data"].get("validation_split")
    if share is not None:
        rows, held_out = rows.split(float(share), int(fit["seed"]))
    elif held_out is None and fit.get("validation") is not None:
        held_out = _rows(fit, "validation", None)
    count = int(fit["workers"]) if workers is None else workers
    with store.files(version) as folder:
        recipe = confined(folder, version.meta["made"])
        settings = RunSettings(threads=int(fit["threads"]))
        estimator, options = _opened(recipe, workers=count, engine=fit["engine"], settings=settings)
    if seed is not None:
        estimator = estimator.copy(seed=seed)
    with sigterm_interrupts():
        estimator._fit(rows, held_out, options, DriverCallbackList([]), RunClock())
    now = estimator.lineage[-1]
    old, new = fit.get("metrics") or {}, now.get("metrics") or {}
    return Reproduction(
        version=version,
        estimator=estimator,
        differences=tuple(differences(fit, now)),
        weights=tuple(name for name, mark in fit["weights"].items() if now["weights"].get(name) != mark),
        metrics={name: (old[name], new.get(name)) for name in old if old[name] != new.get(name)},
    )


@dataclass(frozen=True, kw_only=True)
class Retraining:
    """A version that was trained by the recipe of another one, on other data.

    Attributes:
        version: The new version.
        source: The version whose recipe it is from.
        metrics: The metrics on the held-out rows: of the source, and of the new version.
    """

    version: Version
    source: Version
    metrics: Mapping[str, tuple[float, float]]

    def __str__(self) -> str:
        lines = [f"{self.version} was trained by the recipe of {self.source}"]
        lines += [
            f"{name}: {old:g} of {self.source}, {new:g} now" for name, (old, new) in self.metrics.items()
        ]
        return "\n  ".join(lines)


def retrain(
    models: Shelf,
    version: Version,
    *,
    holdout: Any,
    trusted: bool,
    data: Any = None,
    since: datetime | None = None,
    tag: str | None = None,
) -> Retraining:
    """See `Models.retrain`."""
    fit = _last(version)
    _check_recipe(version, trusted)
    rows, held_out = _newer(fit, data, since), None
    if (share := fit["data"].get("validation_split")) is not None:
        rows, held_out = rows.split(float(share), int(fit["seed"]))
    elif fit.get("validation") is not None:
        held_out = recognise(holdout)
    with models.store.files(version) as folder, Folder("kindler-retrain-") as scratch:
        recipe = confined(folder, version.meta["made"])
        estimator, options = _opened(recipe, workers=int(fit["workers"]), engine=fit["engine"])
        before = estimator.copy()
        with sigterm_interrupts():
            estimator._fit(rows, held_out, options, DriverCallbackList([]), RunClock())
        weights = scratch / "model.weights.h5"  # a name that every framework takes
        models.get(str(version), trusted=True).save(weights)
        before._restore_record(estimator._record)
        before.load_weights(weights)
    old, new = (one.evaluate(holdout, verbose=0) for one in (before, estimator))
    metrics = {name: (old[name], new[name]) for name in old if name not in BOOKKEEPING}
    made = models.put(
        estimator,
        version.name,
        tag=tag,
        trusted=True,
        attributes={
            "retrained_from": str(version),
            "on_holdout": {name: list(v) for name, v in metrics.items()},
        },
        **EstimatorKind().put_again(version.meta),
    )
    return Retraining(version=made, source=version, metrics=metrics)


def _newer(fit: Mapping[str, Any], data: Any, since: datetime | None) -> Input:
    """The given data, or that of the record as it is now; with `since`, files that were written after it."""
    paths = data if data is not None else fit["data"].get("paths") or None
    if paths is None or (data is None and not fit["data"].get("direct")):
        raise ConfigError(
            f"the record does not say where newer data is; it was of the kind {fit['data'].get('kind')!r}.\n"
            "Hint: pass data=..."
        )
    if since is None:
        return recognise(paths)
    if not isinstance(paths, str | os.PathLike | list):
        raise ConfigError("since chooses among files; select the rows of other data before you pass it.")
    known = files_record(parquet.inspect(paths).files)["files"]
    moment = since.astimezone(timezone.utc).isoformat()
    if not (newer := [file["path"] for file in known if (file.get("modified") or "") > moment]):
        raise DataError(f"none of the {len(known)} files of {paths} was written after {moment}.")
    return recognise(newer)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What two fits were made from that is not the same, a sentence each."""
    for name in ("framework", "seed", "workers", "threads", "engine", "device", "start"):
        yield from _changed(name, then.get(name), now.get(name))
    for group, what in (("options", ""), ("strategy", "strategy "), ("columns", ""), ("config", "config ")):
        yield from _changes(what, then.get(group), now.get(group))
    for side in ("data", "validation"):
        before, after = (_hashes(one.get(side), "files", "path") for one in (then, now))
        if set(before) == set(after):
            yield from _changes("file ", before, after)
    yield from _changed("rows", then.get("rows"), now.get("rows"))
    if all(then.get(name) == now.get(name) for name in ("seed", "workers")):  # which deal the rows
        yield from _changed("fingerprint of the rows", then.get("fingerprint"), now.get("fingerprint"))
    yield from _changes("the source of ", *(_hashes(one, "code", "name") for one in (then, now)))
    yield from _changes("package ", then.get("packages"), now.get("packages"))
    yield from _changes("", then.get("machine"), now.get("machine"))


def _hashes(record: Any, entries: str, name: str) -> dict[str, Any]:
    """Hashes by name; but of functions of a script, whose code the recipe has, whatever the script is now."""
    listed = (record or {}).get(entries) or ()
    return {e[name]: e.get("sha256") for e in listed if not str(e[name]).startswith("__main__.")}


def _changes(what: str, then: Any, now: Any) -> Iterator[str]:
    then, now = then or {}, now or {}
    for name in {**then, **now}:
        yield from _changed(f"{what}{name}", then.get(name), now.get(name))


def _changed(name: str, then: Any, now: Any) -> Iterator[str]:
    if then != now:
        yield f"{name}: {one_line(then)} then, {one_line(now)} now"


def _last(version: Version) -> Mapping[str, Any]:
    known = fits(version)
    if not known:
        raise ConfigError(
            f"{version} has no record of what made it.\n"
            "Hint: only estimators that were fitted have one: store.models.put(estimator, name)."
        )
    return known[-1]


def _check_recipe(version: Version, trusted: bool) -> None:
    if not version.meta.get("made"):
        raise ConfigError(
            f"{version} has no recipe: the weights that its last fit began from were too large to keep, or it"
            " was stored from an estimator that had been read from a store."
        )
    if not trusted:
        raise UntrustedError(what=f"training {version} again", reason="its recipe holds code, as a pickle")


def _check_repeatable(version: Version, fit: Mapping[str, Any]) -> None:
    if (step := fit.get("interrupted_after")) is not None:
        raise ConfigError(f"{version}: its fit was interrupted after step {step}, and cannot be repeated.")
    if not fit.get("weights"):
        raise ConfigError(
            f"{version}: the strategy {one_line(fit.get('strategy'))} leaves no hashes of weights, and two"
            " runs of it are not equal to the bit."
        )


def _rows(fit: Mapping[str, Any], side: str, given: Any) -> Input:
    """The data of a fit: what is given, or the files that the record names, unless they have changed."""
    if given is not None:
        return recognise(given)
    known, name = fit[side], "data" if side == "data" else "validation_data"
    files = known.get("files") or []
    if known.get("tables") and known.get("direct") and not files:
        return recognise([Table.of(described) for described in known["tables"]])
    if known.get("tables") or not known.get("direct") or len(files) < known.get("file_count", 0):
        raise ConfigError(
            f"{name}: the record does not say how to read it again; it was of the kind"
            f" {known.get('kind')!r}.\nHint: pass {name}=..., the same data; its fingerprint is compared."
        )
    now = {file["path"]: file for file in files_record([file["path"] for file in files])["files"]}
    wrong = [_file_problem(file, now[file["path"]]) for file in files]
    if problems := [problem for problem in wrong if problem is not None]:
        raise DataError(
            f"{name}: {len(problems)} of {len(files)} files are not those that it was made from:"
            f" {_few(problems)}.\nHint: pass {name}=... to train from other data all the same."
        )
    return recognise([file["path"] for file in files])


def _file_problem(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    if "size" not in now:
        return f"{then['path']} is gone or cannot be read"
    if then.get("sha256") != now["sha256"]:
        return f"{then['path']} has changed ({then.get('size')} bytes then, {now['size']} now)"
    return None


def _opened(recipe: Path, **options: Any) -> tuple[Estimator, Any]:
    try:
        estimator = Estimator.load(recipe, trusted=True, **options)
        with zipfile.ZipFile(recipe) as archive:
            return estimator, cloudpickle.loads(archive.read(FIT))
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"the recipe needs the module {exc.name!r}, which cannot be imported here.\n"
            "Hint: run this where the model was trained from, or install the module."
        ) from exc


def _few(texts: Sequence[str]) -> str:
    more = len(texts) - _NAMED
    return "; ".join(texts[:_NAMED]) + (f"; and {more:,} more" if more > 0 else "")
