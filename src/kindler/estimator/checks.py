"""Whether the arguments of a call can work: functions yield complaints, `refuse` raises all of them at once.

Options that are wrong by themselves are the business of `kindler.train.options`.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from kindler.config import Columns, Device, RunSettings
from kindler.data.column_options import ColumnOptions
from kindler.data.preparation import Prepare
from kindler.errors import ConfigError
from kindler.estimator.inputs.contract import Input
from kindler.estimator.model import FrameworkModel
from kindler.frameworks.registry import FrameworkSpec
from kindler.strategies import Strategy
from kindler.sync.registry import SYNCS, sync_spec
from kindler.train.options import EvaluateOptions, FitOptions, PredictOptions, RunOptions


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "kindler":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def refuse(*complaints: str) -> None:
    """Raise all complaints at once, so that users need not fix arguments one by one."""
    if complaints:
        raise ConfigError(complaints[0] if len(complaints) == 1 else "\n".join(f"- {c}" for c in complaints))


def fit_complaints(
    model: FrameworkModel,
    preparation: Prepare,
    options: FitOptions,
    data: Input,
    validation: Input | None,
) -> Iterator[str]:
    strategy, validated = options.strategy, validation is not None
    yield from ability_complaints(model.row, "train")
    yield from _preparation_complaints(preparation, options, data, validation)
    yield from model.complaints("train")
    yield from model.complaints("data", data.data)
    yield from _row_weight_complaints(model, options)
    if options.nan_loss != "raise" and not model.row.watches_losses:
        yield f"nan_loss={options.nan_loss!r}: the losses of {model.row.name} models are not watched."
    yield from _strategy_complaints(strategy, model)
    # Loaders agree on every step, so a worker that waits for staleness to fall would wait for itself.
    if not data.has_columns and strategy.options.get("max_staleness") is not None:
        yield (
            "max_staleness is for data that has columns: workers that read batches of your own code take"
            " every step together."
        )
    yield from options.complaints()
    yield from _checkpoint_complaints(options, validated=validated)
    yield from column_complaints(options.columns, data, validation)
    yield from _callback_complaints(options.callbacks, model.row, validated=validated)


def split_complaints(share: float, validation: Any) -> Iterator[str]:
    if validation is not None:
        yield "validation_split and validation_data were both passed; pass one of them."
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share < 1:
        yield f"validation_split must be a number between 0 and 1; received {share!r}."


def weight_complaints(columns: Columns, call: str) -> Iterator[str]:
    for name in ("weight_col", "class_weight"):
        if getattr(columns, name) is not None:
            yield f"{call}(columns=Columns({name}=...)): only fit weighs rows."


def evaluate_complaints(
    model: FrameworkModel, preparation: Prepare, options: EvaluateOptions, data: Input
) -> Iterator[str]:
    yield from ability_complaints(model.row, "evaluate")
    yield from model.complaints("judge")
    yield from model.complaints("data", data.data)
    yield from options.complaints()
    yield from column_complaints(options.columns, data)
    yield from _preparation_complaints(preparation, options, data)


def device_of(device: str | Device) -> Device:
    return device if isinstance(device, Device) else Device(str(device))


def group_complaints(group: Any, who: str, *names: str) -> Iterator[str]:
    """Fields of a group that models of this kind do not have."""
    for each in fields(group):
        value = getattr(group, each.name)
        if each.name not in names and value != each.default:
            hint = _INSTEAD.get((who, each.name), "")
            yield f"{type(group).__name__}({each.name}={value!r}) does not apply to {who}.{hint}"


_INSTEAD = {
    ("Keras models", "precision"): "\nHint: set keras.mixed_precision before the model is created.",
    ("Keras models", "compile"): "\nHint: compile_args={'jit_compile': True} compiles with XLA.",
    ("LightningModules", "accumulation_steps"): "\nHint: a smaller batch_size needs less memory, too.",
    ("LightningModules", "scheduler_step"): "\nHint: configure_optimizers sets the interval.",
}


def prepare_complaints(prepare: Prepare | None) -> Iterator[str]:
    if isinstance(prepare, Prepare):
        yield from prepare.complaints()
    elif prepare is not None:
        yield f"prepare must be a kindler.Prepare; received {prepare!r}.\nHint: Prepare(transform=function)."


def run_complaints(arguments: Mapping[str, Any]) -> Iterator[str]:
    workers, seed = arguments.get("workers"), arguments.get("seed", 0)
    engine = arguments.get("engine", "auto")
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        yield f"workers must be at least 1, or None for all slots; received {workers!r}."
    if engine not in ("auto", "local", "spark"):
        yield f"engine must be 'auto', 'local' or 'spark'; received {engine!r}."
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**63:
        yield f"seed must be a whole number from 0 to 2**63 - 1; received {seed!r}."


def precision_complaints(row: FrameworkSpec, options: PredictOptions) -> Iterator[str]:
    asked = options.precision
    if asked is None or asked in row.precisions:
        return
    if row.precisions:
        yield f"precision must be one of {', '.join(map(repr, row.precisions))}, or None; received {asked!r}."
    else:
        yield (
            f"precision={asked!r}: models of the framework {row.name!r} compute in the precision that they "
            "were created with.\nHint: for Keras, set keras.mixed_precision before the model is created."
        )


def _checkpoint_complaints(options: FitOptions, *, validated: bool) -> Iterator[str]:
    if options.resume and options.checkpoint is None:
        yield "resume=True needs the folder of the checkpoints; pass checkpoint=..., its path."
    best = None if options.checkpoint is None else options.checkpoint.best
    if best is not None and str(best).rpartition(":")[2].startswith("val_") and not validated:
        yield f"Checkpoints(best={best!r}) needs validation_data."


def _preparation_complaints(preparation: Prepare, options: RunOptions, *data: Input | None) -> Iterator[str]:
    if not preparation.active:
        return
    if any(item is not None and not item.has_columns for item in data):
        asked = {**preparation.functions, "pad": preparation.pad, "length_col": preparation.length_col}
        names = " and ".join(name for name, value in asked.items() if value is not None)
        yield (
            f"{names}: your own code creates the batches of this data, so they do not apply.\n"
            "Hint: do it in that code, or pass the rows themselves, as a DataFrame, a path or arrays."
        )
    if preparation.length_col is not None and isinstance(options, FitOptions) and not options.shuffle:
        yield "length_col orders rows by length, and shuffle=False keeps their order; pass one of them."


def column_complaints(columns: ColumnOptions, *data: Input | None) -> Iterator[str]:
    """Naming columns is pointless if all data is batches that user code makes."""
    if any(item is not None and item.has_columns for item in data):
        return
    named = {
        "feature_cols": columns.feature_cols,
        "label_cols": columns.label_cols,
        "weight_col": columns.weight_col,
        "shapes": columns.shapes,
        "dtypes": columns.dtypes,
        "stack_features": columns.stack_features,
    }
    for name, value in named.items():
        if value is not None and value is not False:
            yield f"{name} is for data that has columns; functions and loaders create the batches themselves."


def _row_weight_complaints(model: FrameworkModel, options: FitOptions) -> Iterator[str]:
    given = {"class_weight": options.class_weight, "weight_col": options.columns.weight_col}
    names = " and ".join(name for name, value in given.items() if value is not None)
    if not names:
        return
    problems = model.complaints("row_weights")
    if not model.row.row_weights and not problems:
        problems = [f"{model.framework} models do not support row weights; apply them in the loss."]
    yield from (f"{names}: {problem}" for problem in problems)
    labels = options.columns.labels
    if options.class_weight is not None and labels is not None and len(labels) > 1:
        yield f"class_weight needs one label column; received {labels}."


def ability_complaints(row: FrameworkSpec, ability: str) -> Iterator[str]:
    if ability not in row.can:
        yield f"models of {row.name!r} cannot {ability}."


def accelerator_complaints(options: PredictOptions) -> Iterator[str]:
    """A model is converted for the shapes of its columns, which a transform changes."""
    if options.preparation is not None and options.preparation.active:
        yield (
            f"accelerator={options.accelerator!r} takes unprepared columns, and this estimator has a"
            " transform, collate or pad.\nHint: leave accelerator=None; or convert the model with"
            " to_openvino(...) and score prepared columns with Estimator.from_openvino."
        )


def _strategy_complaints(strategy: Strategy, model: FrameworkModel) -> Iterator[str]:
    if not isinstance(strategy, Strategy):
        yield f"strategy must be a name or a value of kindler.strategies; received {strategy!r}."
        return
    try:
        sync_type, row = SYNCS.load(strategy.name), sync_spec(strategy)
    except ConfigError as exc:
        yield f"strategy={strategy.name!r}: {exc}"
        return
    try:
        inspect.signature(sync_type).bind(None, **strategy.options)
    except TypeError as exc:
        yield f"{strategy!r}: these are not options of strategy={strategy.name!r}: {exc}."
    else:
        try:
            sync_type(RunSettings(), **strategy.options)
        except ConfigError as exc:
            yield str(exc)
    able = model.row.strategies
    if able is not None and strategy.name not in able:
        yield (
            f"strategy={strategy.name!r} does not train models of {model.row.name!r}.\n"
            f"Hint: use strategy={' or '.join(map(repr, able))}."
        )
    problems: list[str] = []
    if row.server:
        problems += model.complaints("server")
        if isinstance(shards := strategy.options.get("shards"), int) and shards > 1:
            parts = model.complaints("parts")
            yield from (f"strategies.Async(shards={shards}): {problem}" for problem in parts)
    if row.divides:
        problems += model.complaints("division", strategy.options.get("divide"))
        if row.cuts and not problems:
            problems += model.complaints("division", "elements")
    yield from (f"strategy={strategy.name!r}: {problem}" for problem in problems)


def _callback_complaints(callbacks: Sequence[Any], row: FrameworkSpec, *, validated: bool) -> Iterator[str]:
    base = row.callbacks
    for item in callbacks:
        if not _is_callback(item, base):
            yield f"callbacks of a {row.name} model must be {base[0]}.Callback objects; received {item!r}."
        if type(item).__name__ == "BackupAndRestore":
            yield "BackupAndRestore is what fit(resume=True) does; leave it out and pass checkpoint=... ."
        monitored = str(getattr(item, "monitor", ""))
        # One that saves every epoch looks at no metric, though it may name one.
        if monitored.startswith("val_") and getattr(item, "save_best_only", True) and not validated:
            yield f"{type(item).__name__}(monitor={monitored!r}) needs validation_data."


def _is_callback(item: Any, packages: tuple[str, ...]) -> bool:
    kinds = [(cls.__name__, cls.__module__.partition(".")[0]) for cls in type(item).__mro__]
    return any(name == "Callback" and package in packages for name, package in kinds)
