"""Whether arguments can work: each function gives its complaints, and `refuse` raises all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from kindler.errors import ConfigError
from kindler.frameworks.registry import FrameworkSpec
from kindler.sync.registry import SYNCS

__all__ = [
    "ability_complaints",
    "at_least_one",
    "backend_complaints",
    "callback_complaints",
    "checkpoint_complaints",
    "engine_complaints",
    "epoch_complaints",
    "ingest_complaints",
    "predict_complaints",
    "refuse",
    "row_weight_complaints",
    "seed_complaints",
    "stream_complaints",
    "sync_complaints",
]


def refuse(*complaints: str) -> None:
    """All that is wrong at once, so that nobody mends one argument only to hear of the next."""
    if complaints:
        raise ConfigError(complaints[0] if len(complaints) == 1 else "\n".join(f"- {c}" for c in complaints))


def engine_complaints(workers: int | None, engine: str) -> list[str]:
    found = []
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        found.append(f"workers must be at least 1, or None for all slots; received {workers!r}.")
    if engine not in ("auto", "local", "spark"):
        found.append(f"engine must be 'auto', 'local' or 'spark'; received {engine!r}.")
    return found


def seed_complaints(seed: Any) -> list[str]:
    if isinstance(seed, Integral) and not isinstance(seed, bool) and 0 <= int(seed) < 2**63:
        return []
    return [f"seed must be a whole number from 0 to 2**63 - 1; received {seed!r}."]


def backend_complaints(backend: str | None) -> list[str]:
    known = ("bigdl", "torch_distributed", "horovod", "spark", "ray")
    if backend is None or backend in known:
        return []
    return [f"backend={backend!r} is none of Orca's {list(known)}; leave it out, Kindler needs none."]


def ingest_complaints(ingest: str) -> list[str]:
    if ingest in ("auto", "inline", "direct"):
        return []
    return [f"ingest must be 'auto', 'inline' or 'direct'; received {ingest!r}."]


def at_least_one(**given: int | None) -> list[str]:
    return [
        f"{name} must be a whole number of at least 1; received {value!r}."
        for name, value in given.items()
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
    ]


def checkpoint_complaints(
    *,
    model_dir: str | None,
    resume: bool,
    best_metric: str | None,
    validated: bool,
    checkpoint_trigger: Any,
    end_trigger: Any,
) -> list[str]:
    from kindler.train.metric_names import parse
    from kindler.train.triggers import Trigger

    found = [
        f"{name} must be a trigger, as kindler.EveryEpoch(); received {given!r}."
        for name, given in (("checkpoint_trigger", checkpoint_trigger), ("end_trigger", end_trigger))
        if given is not None and not isinstance(given, Trigger)
    ]
    wants = {"resume=True": resume, "best_metric": best_metric, "checkpoint_trigger": checkpoint_trigger}
    if model_dir is None and any(wants.values()):
        names = [name for name, given in wants.items() if given]
        need = f"{' and '.join(names)} {'needs' if len(names) == 1 else 'need'}"
        found.append(f"{need} a folder of checkpoints; give model_dir=... to the estimator.")
    if best_metric is not None:
        try:
            name, _ = parse(best_metric)
        except ConfigError as exc:
            found.append(f"best_metric: {exc}")
        else:
            if name.startswith("val_") and not validated:
                found.append(f"best_metric={best_metric!r} needs validation_data.")
    return found


def epoch_complaints(
    epochs: int | None, initial_epoch: int | None, validation_freq: int | Sequence[int]
) -> list[str]:
    found = []
    if initial_epoch is not None and not 0 <= initial_epoch < (epochs or 1):
        found.append(
            f"initial_epoch={initial_epoch} must be less than epochs={epochs}, the number of the last epoch."
        )
    numbers = [validation_freq] if isinstance(validation_freq, int) else list(validation_freq)
    if not all(isinstance(number, int) and number >= 1 for number in numbers):
        found.append(
            f"validation_freq must be at least 1, or numbers of epochs; received {validation_freq!r}."
        )
    return found


def stream_complaints(*data: Any, **given: Any) -> list[str]:
    """Columns are named for nothing where all data comes in batches that the user's own code makes."""
    from kindler.train.loader_source import is_stream

    if not all(is_stream(item) for item in data if item is not None):
        return []
    return [
        f"{name} is for data that has columns; functions and loaders decide what their batches consist of."
        for name, value in given.items()
        if value is not None and value is not False
    ]


def predict_complaints(data: Any) -> list[str]:
    from kindler.train.loader_source import is_stream

    works = "a Spark DataFrame, an XShards, a Parquet path with output_path, arrays, a pandas DataFrame"
    complaint = f"predict takes no functions and no loaders; pass {works} or a pyarrow Table."
    return [complaint] if is_stream(data) else []


def row_weight_complaints(row: FrameworkSpec, **given: Any) -> list[str]:
    return [
        f"{name} is not for {row.name} models: the loss weighs rows itself."
        for name, value in given.items()
        if value is not None and not row.row_weights
    ]


def ability_complaints(row: FrameworkSpec, ability: str) -> list[str]:
    return [] if ability in row.can else [f"models of {row.name!r} cannot {ability}."]


def sync_complaints(sync: str) -> list[str]:
    try:
        SYNCS.spec(sync)
    except ConfigError as exc:
        return [f"sync={sync!r}: {exc}"]
    return []


def _is_callback(item: Any, packages: tuple[str, ...]) -> bool:
    kinds = [(cls.__name__, cls.__module__.partition(".")[0]) for cls in type(item).__mro__]
    return any(name == "Callback" and package in packages for name, package in kinds)


def callback_complaints(
    callbacks: Sequence[Any] | None, *, row: FrameworkSpec, validated: bool = True
) -> list[str]:
    base = row.callbacks
    found = [
        f"callbacks of a {row.name} model must be {base[0]}.Callback objects; received {item!r}."
        for item in callbacks or ()
        if not _is_callback(item, base)
    ]
    found += [
        "BackupAndRestore is what fit(resume=True) does, on all workers; leave it out and give model_dir."
        for item in callbacks or ()
        if type(item).__name__ == "BackupAndRestore"
    ]
    # One that keeps all epochs looks at no figure, though it may name one.
    monitored = [
        (type(item).__name__, str(getattr(item, "monitor", "")))
        for item in callbacks or ()
        if getattr(item, "save_best_only", True)
    ]
    found += [
        f"{name}(monitor={figure!r}) needs validation_data."
        for name, figure in monitored
        if figure.startswith("val_") and not validated
    ]
    return found
