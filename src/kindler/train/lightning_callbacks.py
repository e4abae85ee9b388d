"""Lightning's EarlyStopping, ModelCheckpoint and LearningRateMonitor as callbacks that Kindler's loop calls.

Lightning is not imported: whoever passes one of them has done so. Their settings are read from the object,
and what a run found is put on it (`best_model_path`, ...). Subclasses are not translated: hooks of their own
would be left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kindler.errors import ConfigError
from kindler.files import folder_at, split
from kindler.train.callbacks import Callback, EarlyStopping, LearningRateMonitor, Run, watched_value
from kindler.train.driver_callbacks import DriverCallback, RunStatus
from kindler.train.metric_names import Direction, improves


def translated(callbacks: Sequence[Any] | None) -> list[Any]:
    """The same callbacks, with those of Lightning's that have a counterpart in its form.

    Raises:
        ConfigError: One is set to something that has none.
    """
    found: list[Any] = []
    for given in callbacks or ():
        translate = _TRANSLATIONS.get(type(given).__name__)
        is_lightnings = type(given).__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        found += translate(given) if translate is not None and is_lightnings else [given]
    return found


def _early_stopping(given: Any) -> list[Any]:
    hint = "pass fit(end_trigger=kindler.MinLoss(...)) or MaxScore(...)"
    _refuse(given, hint, stopping_threshold=None, divergence_threshold=None)
    return [_Stopping(given)]


def _model_checkpoint(given: Any) -> list[Any]:
    hint = (
        "give the estimator a model_dir, and fit a checkpoint_trigger, for checkpoints that runs resume from"
    )
    _refuse(given, hint, _every_n_train_steps=0, _train_time_interval=None, save_on_exception=False)
    given.dirpath = os.path.abspath(given.dirpath or "checkpoints")  # workers may stand elsewhere
    return [_Checkpoints(given), _CheckpointFacts(given)]


def _rate_monitor(given: Any) -> list[Any]:
    hint = (
        "the history has 'lr', the rate of each epoch; log_dir=... writes that of each step for TensorBoard"
    )
    if given.logging_interval == "step":
        raise ConfigError(f"LearningRateMonitor(logging_interval='step') is not supported.\nHint: {hint}.")
    _refuse(given, hint, log_momentum=False, log_weight_decay=False)
    return [LearningRateMonitor()]


_TRANSLATIONS: dict[str, Callable[[Any], list[Any]]] = {
    "EarlyStopping": _early_stopping,
    "ModelCheckpoint": _model_checkpoint,
    "LearningRateMonitor": _rate_monitor,
}


def _refuse(given: Any, hint: str, **usual: Any) -> None:
    for name, value in usual.items():
        asked = getattr(given, name, value)
        if asked != value:
            raise ConfigError(
                f"{type(given).__name__}({name.lstrip('_')}={asked!r}) is not supported.\nHint: {hint}."
            )


class _Stopping(EarlyStopping):
    def __init__(self, given: Any) -> None:
        super().__init__(
            given.monitor, patience=given.patience, min_delta=abs(given.min_delta), mode=given.mode
        )
        self._check_finite = bool(given.check_finite)

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        value = logs.get(self.monitor)
        if self._check_finite and value is not None and not math.isfinite(value):
            run.stop(f"{self.monitor} is {value}")
            return
        super().on_epoch_end(run, logs)


class _Kept:
    """Which files a ModelCheckpoint keeps: workers and the driver come to the same, epoch by epoch."""

    def __init__(self, given: Any) -> None:
        self.best: list[tuple[float, str]] = []  # the best first
        self._given = given

    def path(self, row: Mapping[str, Any], step: int) -> str:
        metrics = {**row, "epoch": int(row["epoch"]) - 1, "step": step}  # Lightning counts epochs from 0
        return str(self._given.format_checkpoint_name(metrics))

    def due(self, row: Mapping[str, Any]) -> bool:
        given, every = self._given, self._given._every_n_epochs or 1
        if not given.save_top_k or int(row["epoch"]) % every:
            return False
        return given.monitor is None or watched_value("ModelCheckpoint", given.monitor, dict(row)) is not None

    def offer(self, row: Mapping[str, Any], path: str) -> tuple[bool, list[str]]:
        """Whether a file is to be written, and which ones go for it."""
        given = self._given
        score = -float(row["epoch"]) if given.monitor is None else float(row[given.monitor])
        # Without a metric the newest counts as the best.
        way: Direction = "min" if given.monitor is None else given.mode
        place = sum(not improves(score, other, way) for other, _ in self.best)
        self.best.insert(place, (score, path))
        if given.save_top_k < 0 or len(self.best) <= given.save_top_k:
            return True, []
        dropped = self.best.pop()[1]
        return dropped != path, [] if dropped == path else [dropped]


class _Checkpoints(Callback):
    """Writes the files, from the first worker."""

    def __init__(self, given: Any) -> None:
        self._given, self._kept = given, _Kept(given)
        self.monitor = given.monitor or ""

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        if not self._kept.due(logs):
            return
        path = self._kept.path(logs, run.step)
        wanted, dropped = self._kept.offer(logs, path)
        if run.rank != 0:
            return
        paths = [path] if wanted else []
        if self._given.save_last:
            paths.append(_last(self._given))
        data = run.replica.lightning_file(whole=not self._given.save_weights_only) if paths else b""
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
    """Puts on Lightning's object what its users read from it."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._epochs: set[int] = set()

    def on_epoch_end(self, logs: Mapping[str, Any]) -> None:
        self._epochs.add(int(logs["epoch"]))

    def on_run_end(self, status: RunStatus, error: BaseException | None, estimator: Any) -> None:
        if status != "finished":
            return
        given, kept, step = self._given, _Kept(self._given), 0
        for row in estimator.history:
            step += int(row["steps"])
            if int(row["epoch"]) in self._epochs and kept.due(row):
                kept.offer(row, kept.path(row, step))
        if not kept.best:
            return
        score, given.best_model_path = kept.best[0]
        given.best_model_score = None if given.monitor is None else score
        given.best_k_models = {path: value for value, path in kept.best}
        given.last_model_path = _last(given) if given.save_last else ""


def _last(given: Any) -> str:
    return os.path.join(given.dirpath, f"{given.CHECKPOINT_NAME_LAST}{given.FILE_EXTENSION}")
