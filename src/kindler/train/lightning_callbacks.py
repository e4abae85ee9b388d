"""Lightning's EarlyStopping, ModelCheckpoint and LearningRateMonitor as callbacks of Kindler's loop.

Lightning is not imported: whoever passes one has done so. What a run found is put on the object
(`best_model_path`, ...). Subclasses are not translated, as their own hooks would be lost.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kindler.errors import ConfigError
from kindler.files import folder_at, split
from kindler.train.callbacks import (
    Callback,
    DriverCallback,
    EarlyStopping,
    LearningRateMonitor,
    Run,
    RunStatus,
    watched_value,
)
from kindler.train.metric_names import Direction, improves


def translated(callbacks: Sequence[Any] | None) -> list[Any]:
    """Translate Lightning's callbacks; raises ConfigError for settings without a counterpart."""
    result: list[Any] = []
    for original in callbacks or ():
        name = type(original).__name__
        is_lightnings = type(original).__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        if name not in _TRANSLATIONS or not is_lightnings:
            result.append(original)
            continue
        translate, supported, hint = _TRANSLATIONS[name]
        for setting, usual in supported.items():
            value = getattr(original, setting, usual)
            if value != usual and (setting != "logging_interval" or value == "step"):
                raise ConfigError(f"{name}({setting.lstrip('_')}={value!r}) is not supported.\nHint: {hint}.")
        result += translate(original)
    return result


class _Stopping(EarlyStopping):
    def __init__(self, original: Any) -> None:
        super().__init__(
            original.monitor,
            patience=original.patience,
            min_delta=abs(original.min_delta),
            mode=original.mode,
        )
        self._check_finite = bool(original.check_finite)

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        value = logs.get(self.monitor)
        if self._check_finite and value is not None and not math.isfinite(value):
            run.stop(f"{self.monitor} is {value}")
            return
        super().on_epoch_end(run, logs)


class _Kept:
    """Which files a ModelCheckpoint keeps; workers and driver compute the same, epoch by epoch."""

    def __init__(self, original: Any) -> None:
        self.best: list[tuple[float, str]] = []  # the best first
        self._original = original

    def path(self, row: Mapping[str, Any], step: int) -> str:
        metrics = {**row, "epoch": int(row["epoch"]) - 1, "step": step}  # Lightning counts epochs from 0
        return str(self._original.format_checkpoint_name(metrics))

    def due(self, row: Mapping[str, Any]) -> bool:
        original, every = self._original, self._original._every_n_epochs or 1
        if not original.save_top_k or int(row["epoch"]) % every:
            return False
        return (
            original.monitor is None
            or watched_value("ModelCheckpoint", original.monitor, dict(row)) is not None
        )

    def offer(self, row: Mapping[str, Any], path: str) -> tuple[bool, list[str]]:
        original = self._original
        score = -float(row["epoch"]) if original.monitor is None else float(row[original.monitor])
        # Without a metric the newest counts as the best.
        way: Direction = "min" if original.monitor is None else original.mode
        place = sum(not improves(score, other, way) for other, _ in self.best)
        self.best.insert(place, (score, path))
        if original.save_top_k < 0 or len(self.best) <= original.save_top_k:
            return True, []
        dropped = self.best.pop()[1]
        return dropped != path, [] if dropped == path else [dropped]


class _Checkpoints(Callback):
    def __init__(self, original: Any) -> None:
        original.dirpath = os.path.abspath(original.dirpath or "checkpoints")  # workers may stand elsewhere
        self._original, self._kept = original, _Kept(original)
        self.monitor = original.monitor or ""

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        if not self._kept.due(logs):
            return
        path = self._kept.path(logs, run.step)
        wanted, dropped = self._kept.offer(logs, path)
        if run.rank != 0:
            return
        paths = [path] if wanted else []
        if self._original.save_last:
            paths.append(_last(self._original))
        data = run.replica.lightning_file(whole=not self._original.save_weights_only) if paths else b""
        for each in paths:
            folder, name = split(each)
            folder_at(folder).write(name, [data])
        for each in dropped:
            folder, name = split(each)
            folder_at(folder).remove(name)

    def state_dict(self) -> dict[str, Any]:
        return {"best": [list(each) for each in self._kept.best]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept.best = [(score, path) for score, path in state["best"]]


class _CheckpointFacts(DriverCallback):
    """Sets on Lightning's object what its users read from it."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self._epochs: set[int] = set()

    def on_epoch_end(self, logs: Mapping[str, Any]) -> None:
        self._epochs.add(int(logs["epoch"]))

    def on_run_end(self, status: RunStatus, error: BaseException | None, estimator: Any) -> None:
        if status != "finished":
            return
        original, kept, step = self._original, _Kept(self._original), 0
        for row in estimator.history:
            step += int(row["steps"])
            if int(row["epoch"]) in self._epochs and kept.due(row):
                kept.offer(row, kept.path(row, step))
        if not kept.best:
            return
        score, original.best_model_path = kept.best[0]
        original.best_model_score = None if original.monitor is None else score
        original.best_k_models = {path: value for value, path in kept.best}
        original.last_model_path = _last(original) if original.save_last else ""


def _last(original: Any) -> str:
    return os.path.join(original.dirpath, f"{original.CHECKPOINT_NAME_LAST}{original.FILE_EXTENSION}")


# How each is translated, the settings that must have these values, and what to do instead.
_TRANSLATIONS: dict[str, tuple[Callable[[Any], list[Any]], dict[str, Any], str]] = {
    "EarlyStopping": (
        lambda original: [_Stopping(original)],
        {"stopping_threshold": None, "divergence_threshold": None},
        "pass fit(epochs=Epochs(stop_when=...)), which ends training by the loss or the score of an epoch",
    ),
    "ModelCheckpoint": (
        lambda original: [_Checkpoints(original), _CheckpointFacts(original)],
        {"_every_n_train_steps": 0, "_train_time_interval": None, "save_on_exception": False},
        "pass fit(checkpoint=Checkpoints(folder, every=...)) for checkpoints that runs resume from",
    ),
    "LearningRateMonitor": (
        lambda original: [LearningRateMonitor()],
        {"logging_interval": None, "log_momentum": False, "log_weight_decay": False},
        "the history has 'lr', the rate of each epoch; callbacks.TensorBoard writes that of each step",
    ),
}
