"""`zoo.orca.learn.pytorch`: PyTorch models under Orca's names of backends."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from kindler.compat.bigdl.nn.base import regularized
from kindler.compat.bigdl.optim.methods import OptimMethod
from kindler.compat.bigdl.optim.rules_torch import TorchRule, refuse_regularizers, torch_metrics
from kindler.compat.bigdl.optim.validation import ValidationMethod
from kindler.compat.zoo.orca import InvalidInputError
from kindler.compat.zoo.orca.learn.base import (
    TorchEstimator,
    check_backend,
    check_config,
    first_steps,
    strategy_of,
    workers_of,
)
from kindler.compat.zoo.orca.learn.pytorch.callbacks import ModelCheckpoint
from kindler.compat.zoo.orca.learn.pytorch.runner import OrcaHooks, epoch_stats, refuse_fixed
from kindler.compat.zoo.tfpark.training import TFParkEstimator
from kindler.data.column_options import ColumnOptions
from kindler.estimator.run import RunObserver
from kindler.files import folder_at, split
from kindler.train.checkpoints import is_checkpoint
from kindler.train.options import EvaluateOptions, FitOptions, PredictOptions

__all__ = ["Estimator", "PyTorchEstimator"]

_BACKENDS = ("bigdl", "spark", "ray", "torch_distributed", "horovod")


class Estimator(TorchEstimator):
    """Made by `from_torch`. Data is also a `DataLoader`, which has its own batch size, or a function of
    `(config, batch_size)` that returns one; it gets its worker's share of `batch_size`.
    """

    _core: _ReportingEstimator

    def __init__(self, backend: str, **options: Any) -> None:
        optimizer = options["optimizer"]
        self.backend, self._options = backend, options
        self._strategy = strategy_of(backend, divide=_divide(optimizer, options["model"]))
        if isinstance(optimizer, OptimMethod):
            options["optimizer"] = TorchRule(optimizer)
        super().__init__()

    @staticmethod
    def from_torch(
        *,
        model: Any = None,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Any = None,
        backend: str | None = None,
        config: Mapping[str, Any] | None = None,
        workers_per_node: int = 1,
        scheduler_creator: Any = None,
        use_tqdm: bool = False,
        model_dir: Any = None,
        sync_stats: bool = False,
        log_level: int = logging.INFO,
        log_to_driver: bool = True,
        scheduler_step_freq: str = "epoch",
        initialization_hook: Any = None,
        training_operator_cls: Any = None,
    ) -> Estimator:
        """All backends compute the same; with "bigdl" each worker holds a slice of the optimizer's state.
        None is "bigdl" for a module and "spark" for a function, as the two generations of Orca have it.

        `use_tqdm`, `sync_stats`, `log_level` and `log_to_driver` are without effect: progress and what
        workers print are shown, and figures are always those of all workers.
        """
        if training_operator_cls is not None or initialization_hook is not None:
            raise InvalidInputError(
                "training_operator_cls and initialization_hook are not supported.\nHint: override"
                " on_iter_forward of a MainCallback, and before_run of a callback."
            )
        if scheduler_step_freq not in ("epoch", "batch"):
            raise InvalidInputError(
                f"scheduler_step_freq must be epoch or batch; received {scheduler_step_freq!r}."
            )
        check_config(config, "fit/evaluate/predict")
        if not callable(model):
            raise InvalidInputError(
                f"Must provide a function for model_creator, or a model; received {model!r}."
            )
        return Estimator(
            check_backend(backend or ("bigdl" if isinstance(model, torch.nn.Module) else "spark"), _BACKENDS),
            model=model,
            optimizer=optimizer,
            loss=loss,
            metrics=_metrics(metrics, loss),
            scheduler=scheduler_creator,
            scheduler_step="step" if scheduler_step_freq == "batch" else "epoch",
            config=config,
            model_dir=model_dir,
            workers=workers_of(workers_per_node),
        )

    @staticmethod
    def latest_checkpoint(checkpoint_dir: str) -> str:
        """The file `last.ckpt` that `ModelCheckpoint` wrote to a folder."""
        path = ModelCheckpoint.get_latest_checkpoint(checkpoint_dir)
        folder, name = split(path)
        if name not in folder_at(folder).names():
            raise InvalidInputError(f"The checkpoint {path} does not exist.")
        return path

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        max_steps: int | None = None,
        batch_size: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        feature_cols: Any = None,
        label_cols: Any = None,
        validation_data: Any = None,
        callbacks: Any = None,
        checkpoint_trigger: Any = None,
        info: Any = None,
    ) -> Any:
        """With the backend "bigdl" the estimator; otherwise a list with the stats of each epoch.

        With `reduce_results=False` each epoch is a list with the figures of each worker. `info` is without
        effect: only a `training_operator_cls` of Orca read it.
        """
        hooks = list(callbacks or ())
        refuse_fixed(hooks)
        if hooks:
            hooks = [OrcaHooks(hooks, self._options["config"] or {}, None if max_steps else epochs)]
        trigger = {} if checkpoint_trigger is None else {"checkpoint_trigger": checkpoint_trigger}
        rows = self._core.fit(
            data,
            epochs=None if max_steps is not None else epochs,
            max_steps=max_steps,
            batch_size=32 if batch_size is None else batch_size,
            feature_cols=feature_cols,
            label_cols=label_cols,
            validation_data=validation_data,
            callbacks=hooks,
            **trigger,
            strategy=self._strategy,
        )
        if isinstance(self._options["model"], torch.nn.Module):
            self._core.get_model()
        if self.backend == "bigdl":
            return self
        return [self._stats(row, reduce_results, profile) for row in rows]

    def _stats(self, row: Mapping[str, Any], reduce_results: bool, profile: bool) -> Any:
        more = {"profile": {"epoch_s": row["seconds"]}} if profile else {}
        reports = self._core.reports
        if reduce_results:
            return epoch_stats(row, reports.last_loss(row)) | more
        return [epoch_stats(own, reports.last_loss(row, rank)) | more for rank, own in reports.by_worker(row)]

    def evaluate(
        self,
        data: Any,
        batch_size: int | None = None,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        feature_cols: Any = None,
        label_cols: Any = None,
        callbacks: Sequence[Any] | None = None,
        validation_metrics: Any = None,
        info: Mapping[str, Any] | None = None,
    ) -> Any:
        """Figures: "num_samples", "val_loss", and each metric by its name; every row counts once.

        With `reduce_results=False` it is a list with the figures of each worker. `profile` and `info` are
        without effect.
        """
        if callbacks:
            raise InvalidInputError("evaluate has no callbacks.\nHint: those of fit see each validation.")
        core, rows = self._core, 32 if batch_size is None else batch_size
        if validation_metrics is not None:
            core = self._successor(metrics=_metrics(validation_metrics, self._options["loss"]))
        scores = core.evaluate(
            first_steps(data, num_steps, rows, "num_steps"),
            batch_size=rows,
            feature_cols=feature_cols,
            label_cols=label_cols,
        )
        if reduce_results:
            return _renamed(scores)
        return [_renamed(own) for own in core.reports.evaluated()]

    def predict(
        self,
        data: Any,
        batch_size: int = 32,
        feature_cols: Any = None,
        output_cols: Any = None,
        profile: bool = False,
        callbacks: Sequence[Any] | None = None,
    ) -> Any:
        """The data with the outputs, as `prediction`; axes of length 1 are taken out, as Orca does."""
        if callbacks:
            raise InvalidInputError("predict has no callbacks.\nHint: let the model return what you need.")
        names = (output_cols,) if isinstance(output_cols, str) else tuple(output_cols or ()) or None
        options = PredictOptions(
            batch_size=batch_size,
            columns=ColumnOptions(feature_cols=feature_cols, allow_nan=True),
            output_cols=names,
            finish=None if self.backend == "bigdl" else _squeezed,
        )
        return self._core._predict_with(data, options)

    def get_state_dict(self) -> dict[str, Any]:
        return {"epoch": self._core.counters[0], "models": [self.get_model().state_dict()]}

    def save(self, model_path: str, entire: bool = False) -> str:
        if entire:
            torch.save(self.get_model(), model_path)
        else:
            self._core.save(model_path)
        return model_path

    def load(self, model_path: str) -> None:
        """Read what `save`, `save_checkpoint` or `ModelCheckpoint` wrote, other than entire modules."""
        folder, name = split(model_path)
        if is_checkpoint(folder_at(folder).read(name, 64)):
            self._core.load_checkpoint(model_path)
        else:
            self._core.load_weights(model_path)

    load_checkpoint = load

    def save_checkpoint(self, model_path: str) -> None:
        self._core.save_checkpoint(model_path)

    def load_state_dict(self, state_dict: Mapping[str, Any], blocking: bool = True) -> None:
        states = state_dict["models"][0] if "models" in state_dict else state_dict
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/weights.pt"
            torch.save(states, path)
            self._core.load_weights(path)

    def _make(self, *, clip_norm: Any, limits: Any, **options: Any) -> _ReportingEstimator:
        if limits is not None and limits[0] != -limits[1]:
            raise InvalidInputError(
                f"gradients are clipped between -c and c; received {limits[0]} and {limits[1]}."
            )
        clipping = {"clip_norm": clip_norm, "clip_value": None if limits is None else limits[1]}
        made = _ReportingEstimator.from_torch(**{**self._options, **options}, **clipping)
        assert isinstance(made, _ReportingEstimator)
        return made


PyTorchEstimator = Estimator


class _Reports(RunObserver):
    """What workers reported of a run: figures of each, and losses of their steps."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
        self._losses: dict[int, dict[int, tuple[float, float]]] = {}
        self._last_steps: dict[int, int] = {}

    def hear(self, fields: Mapping[str, Any]) -> None:
        if fields["name"] == "worker":
            key = (fields["part"], int(fields["epoch"]))
            self._figures.setdefault(key, {})[int(fields["rank"])] = fields["figures"]
        elif fields["name"] == "steps":
            own = self._losses.setdefault(int(fields["rank"]), {})
            pairs = zip(fields["loss"], fields["rows"], strict=True)
            own.update({fields["first"] + place: pair for place, pair in enumerate(pairs)})
        elif fields["name"] == "epoch":
            self._last_steps[int(fields["row"]["epoch"])] = int(fields["step"])

    def last_loss(self, row: Mapping[str, Any], rank: int | None = None) -> float | None:
        """The loss of the last step of an epoch, of all workers or of one; None where it is not known."""
        step = self._last_steps.get(row["epoch"])
        ranks = self._losses if rank is None else {rank: self._losses.get(rank, {})}
        parts = [own[step] for own in ranks.values() if step in own]
        weight = sum(rows for _, rows in parts)
        return sum(loss * rows for loss, rows in parts) / weight if weight else None

    def by_worker(self, row: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The figures of an epoch, as rows of the history, of each worker."""
        trained = self._figures.get(("train", row["epoch"]), {})
        validated = self._figures.get(("validation", row["epoch"]), {})
        for rank in sorted(trained):
            own = {"epoch": row["epoch"], "steps": row["steps"], **trained[rank]}
            yield rank, own | {f"val_{name}": value for name, value in validated.get(rank, {}).items()}

    def evaluated(self) -> list[Mapping[str, Any]]:
        (ranks,) = [ranks for (part, _), ranks in self._figures.items() if part == "validation"]
        return [ranks[rank] for rank in sorted(ranks)]


class _ReportingEstimator(TFParkEstimator):
    """Keeps the reports of its last run, for `reduce_results=False`."""

    reports: _Reports

    def _observers(self, options: FitOptions | EvaluateOptions) -> Sequence[RunObserver]:
        self.reports = _Reports()
        return [*super()._observers(options), self.reports]


def _renamed(scores: Mapping[str, Any]) -> dict[str, Any]:
    return {"val_loss" if name == "loss" else name: value for name, value in scores.items()}


def _metrics(given: Any, loss: Any) -> Any:
    """Metrics of Orca by the names of their classes, and others as they are."""
    several = list(given) if isinstance(given, list | tuple) else [given]
    if not any(isinstance(part, ValidationMethod) for part in several):
        return given
    made: dict[str, Any] = {}
    for part in several:
        if isinstance(part, ValidationMethod):
            (metric,) = torch_metrics([part], loss).values()
            made[type(part).__name__] = metric
        else:
            made[getattr(part, "__name__", type(part).__name__)] = part
    return made


def _divide(optimizer: Any, model: Any) -> str | None:
    """What the work of an optimizer can be divided into, as `strategy_of` takes it."""
    if isinstance(optimizer, OptimMethod):
        # Regularizers know whole parameters only.
        whole = isinstance(model, torch.nn.Module) and any(True for _ in regularized(model))
        return None if whole else "elements"
    refuse_regularizers(model)
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    known = issubclass(kind, torch.optim.Optimizer) and kind.__module__.startswith("torch.optim")
    return "" if known else None


def _squeezed(outputs: list[Any]) -> list[Any]:
    return [part.reshape(part.shape[0], *(n for n in part.shape[1:] if n != 1)) for part in outputs]
