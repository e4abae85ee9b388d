"""How an estimator and its model get to files and back: weights, checkpoints, exports, whole estimators.

A saved estimator is a zip archive of its settings (JSON), its model's recipe and its trained state. Only the
recipe, a pickle of the user's own code, can run code when read: that needs `trusted`.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import cloudpickle
import numpy as np

from kindler.config import Device, RunSettings
from kindler.data.column_options import ColumnOptions
from kindler.data.preparation import Prepare
from kindler.data.statistics import Statistics
from kindler.errors import ConfigError, NotFittedError, UntrainedWarning, UntrustedError
from kindler.estimator.checks import ability_complaints, refuse, run_complaints, warn_caller
from kindler.estimator.constructors import Constructors
from kindler.estimator.exporting import example_of, write_onnx, write_openvino
from kindler.estimator.lineage import FIT, RECIPE_BYTES, Lineage, record
from kindler.estimator.model import FrameworkModel, LiveModel
from kindler.estimator.run import RunResults
from kindler.files import folder_at, split
from kindler.frameworks.caller_state import leaves_no_trace
from kindler.frameworks.pickling import pickle_for_workers
from kindler.temporary import beside
from kindler.train.checkpoints import (
    Header,
    is_checkpoint,
    is_model_file,
    latest,
    read_checkpoint,
    write_checkpoint,
)
from kindler.train.goodput import Goodput
from kindler.train.history import History
from kindler.train.options import FitOptions, RunConfig
from kindler.types import ScoringData

if TYPE_CHECKING:
    from typing_extensions import Self

SUFFIX = ".estimator"

_FORMAT = 1
_FACTS, _RECIPE, _STATE, _PREPARATION = "estimator.json", "recipe.pickle", "state", "preparation.pickle"
_MADE = "made.estimator"
_IN_FILE = ("workers", "engine", "device", "seed")
_CAN_BE_PASSED = ("workers", "engine", "device", "settings")


class _OnTheClass(classmethod):  # type: ignore[type-arg]
    """A class method that an instance does not have: it would be left as it is."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None:
            raise AttributeError("Estimator.load creates an estimator; load_weights loads into this one.")
        return super().__get__(instance, owner)


class Saving(Constructors):
    """The methods of `Estimator` that copy it, and that read and write files."""

    _model: FrameworkModel
    _live: LiveModel
    _run_config: RunConfig
    _prepare: Prepare
    _columns: ColumnOptions
    _layout: dict[str, Any]
    _lineage: Lineage
    _statistics: dict[str, Any] | None
    history: History

    @leaves_no_trace
    def save(self, path: str | PathLike[str]) -> None:
        """Write the model in its framework's own format. A file is written completely or not at all.

        For PyTorch this is a state dict that `torch.load` reads. For Keras the name decides: `.keras` is the
        model, `.weights.h5` its weights, and a name without a suffix a SavedModel for serving (on
        TensorFlow). For any framework, a name that ends in `.estimator` saves this whole estimator for
        `Estimator.load`.
        """
        self._warn_if_untrained("save")
        with beside(path) as unfinished:
            if str(path).endswith(SUFFIX):
                self._write_whole(unfinished)
            else:
                self._live.replica.save(str(unfinished))

    @leaves_no_trace
    def copy(
        self,
        *,
        config: Mapping[str, Any] | None = None,
        learning_rate: float | None = None,
        workers: int | None = None,
        seed: int | None = None,
        settings: RunSettings | None = None,
    ) -> Self:
        """Return an independent estimator of the same model, with what it has learned so far.

        Training the copy changes neither this estimator nor the model it was made from.

        Args:
            config: Entries of `config` to change; creators are called with them.
            learning_rate: The optimizer's learning rate, instead of this estimator's.
            workers: Number of workers, instead of this estimator's.
            seed: The seed, instead of this estimator's.
            settings: Time limits, threads, shared memory, instead of this estimator's.

        Raises:
            ConfigError: The framework, or the way the model was passed, cannot take the config or the rate.
        """
        own, state = self._model, self._live.state
        asked = {"workers": workers, "seed": seed, "settings": settings}
        changes = {name: value for name, value in asked.items() if value is not None}
        refuse(*run_complaints(changes))
        if learning_rate is not None and state:
            raise ConfigError(
                f"learning_rate={learning_rate}: this estimator was already trained, and continues with the"
                " rate of its optimizer's state.\nHint: copy it before its first fit."
            )
        model = FrameworkModel.unpacked(own.framework, own.packed, own.extra_preload)
        if config or learning_rate is not None:
            changed = model.replica_type.changed(
                model.spec, config=dict(config or {}), learning_rate=learning_rate
            )
            model = replace(model, spec=changed)
        copied = self._create(model, **{**self._arguments(), **changes})
        if state:
            copied._live.state = state
        copied._restore_record(self._record)
        copied._lineage = self._lineage
        return copied

    def _arguments(self) -> dict[str, Any]:
        """What this estimator was made with, besides its model."""
        config = self._run_config
        return {
            "workers": config.workers,
            "engine": config.engine,
            "device": Device(config.device, share=config.share_gpus),
            "seed": config.seed,
            "settings": config.settings,
            "prepare": self._prepare,
        }

    def _continue_from(self, other: Saving) -> None:
        """Take over the trained state, columns and history of another estimator of the same model."""
        if other._live.state:
            self._live.state = other._live.state
            self._restore_record(other._record)
            self._lineage = other._lineage

    @leaves_no_trace
    def to_onnx(self, path: str | PathLike[str], example: ScoringData | None = None) -> None:
        """Write the trained model as an ONNX file that takes any number of rows.

        Args:
            path: The file.
            example: A few rows, as `predict` takes them. None takes the shapes of the last `fit`.

        Raises:
            ConfigError: The model cannot be exported, or the shapes of its inputs are not known.
            MissingExtraError: A package that this needs is not installed.
        """
        refuse(*ability_complaints(self._model.row, "export"))
        self._warn_if_untrained("to_onnx")
        write_onnx(
            self._model, self._live.for_scoring(), path, example_of(example, self._columns, self._layout)
        )

    @leaves_no_trace
    def to_openvino(self, path: str | PathLike[str], example: ScoringData | None = None) -> None:
        """Write the trained model as OpenVINO files, which `Estimator.from_openvino` reads.

        Args:
            path: The .xml file; the weights go to a .bin file of the same name.
            example: A few rows, as `predict` takes them. None takes the shapes of the last `fit`.

        Raises:
            ConfigError: The model cannot be converted, or the shapes of its inputs are not known.
            MissingExtraError: OpenVINO is not installed.
        """
        self._warn_if_untrained("to_openvino")
        write_openvino(
            self._model,
            self._live.for_scoring(),
            path,
            lambda: example_of(example, self._columns, self._layout),
        )

    @leaves_no_trace
    def load_weights(self, path: str | PathLike[str]) -> Self:
        """Load weights from a file that `save` or the framework itself wrote.

        For Keras this includes the optimizer's state if the file has it and the optimizer is the same; a
        warning says if the optimizer differs.
        """
        self._live.load_weights(str(path))
        self._lineage = Lineage()
        return self

    @classmethod
    @leaves_no_trace
    def load(cls, path: str | PathLike[str], *, trusted: bool = False, **options: Any) -> Self:
        """Create an estimator, optimizer included, from a file. For weights alone see `load_weights`.

        Args:
            path: An `.estimator` file that `save` wrote, of any framework, or a `.keras` file.
            trusted: An `.estimator` file contains the model's code as a pickle, which can run anything when
                read: pass True only for files from people whose programs you would run. A `.keras` file needs
                it only if it contains lambdas.
            options: Settings that are not in the file or should differ: `workers`, `engine`, `device`,
                `settings`; for a `.keras` file, the arguments of `from_keras`.

        Raises:
            UntrustedError: The file contains code, and `trusted` was not passed.
            ConfigError: The file is of neither kind.
        """
        if str(path).endswith(".keras"):
            from kindler.frameworks.keras.files import read_model

            return cls.from_keras(model=read_model(str(path), trusted=trusted), **options)
        facts, recipe, state, preparation, made = _read(path)
        if not trusted:
            raise UntrustedError(what=f"loading {path}", reason="it holds a model's code, as a pickle")
        wrong = sorted(set(options) - set(_CAN_BE_PASSED))
        refuse(*(f"{name} is in the file and cannot be passed to load." for name in wrong))
        model = FrameworkModel.unpacked(facts["framework"], recipe, tuple(facts["preload"]))
        arguments = {name: facts[name] for name in _IN_FILE} | options
        if preparation:
            arguments["prepare"] = cloudpickle.loads(preparation)
        estimator = cls._create(model, **arguments)
        estimator._restore_record(facts)
        estimator._live.state = state
        estimator._lineage = replace(estimator._lineage, recipe=made)
        return estimator

    if not TYPE_CHECKING:
        load = _OnTheClass(load.__func__)

    @leaves_no_trace
    def save_checkpoint(self, path: str | PathLike[str]) -> None:
        """Write what training needs to continue: weights, optimizer, scheduler, random state, epoch."""
        state = self._live.state
        if not state:
            raise NotFittedError("nothing was trained yet; call fit() before save_checkpoint().")
        replica = self._live.replica
        header = Header(
            framework=self._model.framework,
            epoch=replica.epoch,
            step=replica.step,
            seed=self._run_config.seed,
        )
        write_checkpoint(path, header, state)

    @leaves_no_trace
    def load_checkpoint(self, path: str | PathLike[str]) -> Self:
        """Continue from a file that `save_checkpoint`, `fit(checkpoint=...)` or a ModelCheckpoint wrote.

        A model file, such as Keras's ModelCheckpoint writes, is loaded with `load_weights`. The next `fit`
        starts a new epoch, even if the checkpoint was written mid-epoch; `fit(resume=True)` continues in
        the middle.

        Raises:
            ConfigError: The file is not a complete checkpoint, or belongs to another framework.
        """
        folder, name = split(path)
        if is_model_file(name) and not is_checkpoint(folder_at(folder).read(name, 64)):
            return self.load_weights(path)
        checkpoint = read_checkpoint(path)
        if checkpoint.header.framework != self._model.framework:
            raise ConfigError(
                f"{path} is a checkpoint from {checkpoint.header.framework!r}, but this model is from"
                f" {self._model.framework!r}."
            )
        self._live.load_state(checkpoint.state)
        self._lineage = Lineage()
        return self

    @staticmethod
    def latest_checkpoint(folder: str | PathLike[str]) -> str | None:
        """Return the newest complete checkpoint in a folder, or None; `load_checkpoint` reads it.

        That is a checkpoint that `fit(checkpoint=folder)` wrote, or a newer file that a callback wrote there:
        Kindler's ModelCheckpoint or Keras's. Damaged checkpoints are skipped with a warning that names them.
        """
        return latest(folder)

    def _write_whole(self, path: Path) -> None:
        made = {_MADE: self._lineage.recipe} if self._lineage.recipe else {}
        self._write(path, self._model.packed, self._live.state, self._record, made)

    def _write(
        self,
        to: Path | BinaryIO,
        packed: bytes,
        state: bytes,
        record: Mapping[str, Any],
        others: Mapping[str, bytes],
    ) -> None:
        facts = {
            "format": _FORMAT,
            "framework": self._model.framework,
            **{name: getattr(self._run_config, name) for name in _IN_FILE},
            "preload": list(self._model.extra_preload),
            **record,
        }
        files: dict[str, str | bytes] = {_FACTS: json.dumps(facts), _RECIPE: packed, _STATE: state, **others}
        if self._prepare.functions or self._prepare.active:
            files[_PREPARATION] = pickle_for_workers(self._prepare)
        with zipfile.ZipFile(to, "w", zipfile.ZIP_STORED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)

    def _keep_lineage(self, options: FitOptions, results: RunResults, began: str) -> None:
        """Keep what made the weights that a fit has just trained."""
        try:
            self._lineage = self._made_by(options, results, began)
        except Exception as exc:  # noqa: BLE001 - what was trained must not be lost for its record
            self._lineage = Lineage()
            warn_caller(f"this fit is not in the lineage of the model, as {type(exc).__name__}: {exc}")

    def _made_by(self, options: FitOptions, results: RunResults, began: str) -> Lineage:
        before = results.before
        new = "given weights" if self._model.facts.has_instance else "a creator"
        recipe = io.BytesIO()
        if len(results.packed) + len(before) <= RECIPE_BYTES:
            again = replace(options, checkpoint=None, resume=False, verbose=0)
            empty = {**self._record, "history": [], "goodput": None, "lineage": []}
            self._write(recipe, results.packed, before, empty, {FIT: pickle_for_workers(again)})
        fit = record(
            self._model,
            options,
            self._run_config,
            {**results.made, "interrupted_after": results.step if results.halted else None},
            results.rows[-1] if results.rows else {},
            began=began,
            start="the fit before" if before or self._lineage.fits else new,
            parent=self._lineage.version,
            functions=self._prepare.functions,
        )
        return Lineage((*self._lineage.fits, fit), recipe.getvalue())

    def _stored_as(self, version: Mapping[str, Any]) -> None:
        """The weights are those of this version, which the next fit names as its parent."""
        self._lineage = replace(self._lineage, version=dict(version))

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """What made the current weights: a record of each `fit` they come from, oldest first, as JSON.

        Empty after weights were loaded from a file. See the guide "Lineage" for what is in a record.
        """
        return [dict(fit) for fit in self._lineage.fits]

    @property
    def signature(self) -> dict[str, Any]:
        """The columns that the last `fit` read, as JSON: their names, dtypes and row shapes."""
        columns = self._columns
        shapes = {name: np.atleast_1d(shape).tolist() for name, shape in (columns.shapes or {}).items()}
        dtypes = {name: np.dtype(dtype).name for name, dtype in (columns.dtypes or {}).items()}
        return {
            "feature_cols": columns.feature_cols,
            "label_cols": columns.label_cols,
            "shapes": shapes or None,
            "dtypes": dtypes or None,
            "stack_features": columns.stack_features or False,
            "allow_nan": columns.allow_nan or False,
            "layout": self._layout,
        }

    @property
    def statistics(self) -> dict[str, Any] | None:
        """What the rows of the last `fit` were like, as JSON: counts, moments, quantiles, categories.

        None before a `fit`, and after one with batches that your own code creates.
        """
        return deepcopy(self._statistics)

    @property
    def _record(self) -> dict[str, Any]:
        """What is known of the training, besides its result, as JSON."""
        goodput = self.history.goodput
        return {
            "signature": self.signature,
            "history": list(self.history),
            "goodput": None if goodput is None else dict(goodput.seconds),
            "lineage": self.lineage,
            "statistics": self._statistics,
        }

    def _restore_record(self, record: Mapping[str, Any]) -> Self:
        """Take over the `_record` of another estimator of the same model."""
        signature, seconds, statistics = record["signature"], record.get("goodput"), record.get("statistics")
        self._layout = dict(signature["layout"])
        self._columns = ColumnOptions(**{key: value for key, value in signature.items() if key != "layout"})
        self._statistics = None if statistics is None else Statistics.from_json(statistics).to_json()
        self.history = History(record["history"], goodput=None if seconds is None else Goodput(seconds))
        self._lineage = Lineage(tuple(record.get("lineage") or ()))
        return self

    def _warn_if_untrained(self, call: str) -> None:
        if self._live.is_untrained:
            warn_caller(
                f"{call}: this model was never trained, and no weights were loaded. Its weights come from "
                f"its creator: random numbers, drawn with seed={self._run_config.seed}, unless"
                " the creator loads trained ones.\n"
                "Hint: call fit(), load_weights(path) or load_checkpoint(path) first. If the creator loads"
                " trained weights, pass the model itself (model=...), or silence this with"
                ' warnings.filterwarnings("ignore", category=kindler.errors.UntrainedWarning).',
                UntrainedWarning,
            )


def _read(path: str | PathLike[str]) -> tuple[dict[str, Any], bytes, bytes, bytes, bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            facts = json.loads(archive.read(_FACTS))
            there = set(archive.namelist())
            prepared, made = (archive.read(n) if n in there else b"" for n in (_PREPARATION, _MADE))
            recipe, state = archive.read(_RECIPE), archive.read(_STATE)
    except (zipfile.BadZipFile, KeyError, ValueError) as exc:
        raise ConfigError(
            f"{path} is not a saved estimator: {exc}.\n"
            f"Hint: est.save('name{SUFFIX}') writes one. To load weights alone, build the estimator and call"
            " est.load_weights(path)."
        ) from exc
    if facts.get("format") != _FORMAT:
        raise ConfigError(
            f"{path} has estimator format {facts.get('format')!r}; this version of Kindler reads {_FORMAT}."
        )
    return facts, recipe, state, prepared, made
