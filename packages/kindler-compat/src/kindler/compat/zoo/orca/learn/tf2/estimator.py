"""`zoo.orca.learn.tf2.Estimator`: Keras models made by creator functions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from kindler.compat.zoo.orca.errors import InvalidInput, as_orca, refuse_given
from kindler.compat.zoo.orca.learn.base import (
    OrcaEstimator,
    check_backend,
    check_config,
    configured,
    first_steps,
    workers_of,
)
from kindler.estimator.estimator import Estimator as CoreEstimator

__all__ = ["Estimator", "TensorFlow2Estimator"]

_BACKENDS = ("tf2", "ray", "spark", "horovod")
_NOT_METRICS = ("epoch", "steps", "num_samples", "seconds", "rows_per_s", "val_num_samples")


class Estimator:
    """Creates estimators of Keras models."""

    @staticmethod
    @as_orca
    def from_keras(
        *,
        model_creator: Any = None,
        config: Mapping[str, Any] | None = None,
        verbose: bool = False,
        workers_per_node: int = 1,
        compile_args_creator: Any = None,
        backend: str = "ray",
        cpu_binding: bool = False,
        log_to_driver: bool = True,
        model_dir: str | PathLike[str] | None = None,
        **kwargs: Any,
    ) -> TensorFlow2Estimator:
        """Create an estimator from a function that makes a Keras model.

        Args:
            model_creator: Called with `config`; returns a compiled model.
            config: The argument of all creators; it must not contain "batch_size".
            workers_per_node: Workers of each node; a local session is one node.
            compile_args_creator: Called with `config`; returns the arguments of `compile`, for a model that
                is not compiled yet.
            backend: "tf2", "ray", "spark" or "horovod"; all compute the same.
            model_dir: A folder for checkpoints.
            verbose, cpu_binding, log_to_driver: Without effect: `fit` has its own `verbose`.
            kwargs: Must be empty.
        """
        check_backend(backend, _BACKENDS)
        refuse_given("from_keras", **kwargs)
        check_config(config, "fit/evaluate")
        if not callable(model_creator):
            raise InvalidInput(f"model_creator must be a function of config; received {model_creator!r}.")
        made = CoreEstimator.from_keras(
            model_creator=model_creator,
            config=config,
            compile_args_creator=compile_args_creator,
            workers=workers_of(workers_per_node),
            model_dir=model_dir,
        )
        return TensorFlow2Estimator(made)

    @staticmethod
    @as_orca
    def latest_checkpoint(checkpoint_dir: str) -> str | None:
        return CoreEstimator.latest_checkpoint(checkpoint_dir)


class TensorFlow2Estimator(OrcaEstimator):
    """Trains, evaluates and scores a Keras model. Made by `Estimator.from_keras`."""

    def __init__(self, core: CoreEstimator) -> None:
        self._core = core

    @as_orca
    def fit(
        self,
        data: Any,
        epochs: int = 1,
        batch_size: int = 32,
        verbose: int = 1,
        callbacks: Sequence[Any] | None = None,
        validation_data: Any = None,
        class_weight: Mapping[int, float] | None = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_freq: Any = 1,
        data_config: Mapping[str, Any] | None = None,
        feature_cols: Any = None,
        label_cols: Any = None,
    ) -> dict[str, Any]:
        """Train; see `OrcaEstimator` for the arguments of data.

        Args:
            data: Also a function of `(config, batch_size)` that returns a `tf.data.Dataset`; it gets its
                worker's share of `batch_size`.
            epochs: Number of the last epoch.
            batch_size: Rows of a step over all workers.
            verbose: 0 shows no progress.
            callbacks: Callbacks of Keras.
            validation_data: Data of the same kind.
            class_weight: The weight of a row by its label.
            initial_epoch: The epoch to start counting from.
            steps_per_epoch: Steps of an epoch; None is one pass over all rows.
            validation_steps: How many steps of the validation data are judged; None is every row.
            validation_freq: Validate every so many epochs.
            data_config: More entries of the config that functions which make data are called with.

        Returns:
            What Keras's history has: "epochs", "steps", "verbose", and a list of each metric, a value an
            epoch.
        """
        judged = first_steps(validation_data, validation_steps, batch_size, "validation_steps")
        rows = self._core.fit(
            configured(data, data_config),
            epochs=epochs,
            batch_size=batch_size,
            verbose=verbose,
            callbacks=callbacks,
            validation_data=configured(judged, data_config),
            class_weight=class_weight,
            steps_per_epoch=steps_per_epoch,
            validation_freq=validation_freq,
            feature_cols=feature_cols,
            label_cols=label_cols,
            initial_epoch=initial_epoch or None,
        )
        names = [name for name in rows.names if name not in _NOT_METRICS]
        figures = {name: [value for value in rows[name] if value is not None] for name in names}
        return {"verbose": verbose, "epochs": epochs, "steps": rows[-1]["steps"], **figures}

    @as_orca
    def evaluate(
        self,
        data: Any,
        batch_size: int = 32,
        num_steps: int | None = None,
        verbose: int = 1,
        sample_weight: Any = None,
        callbacks: Sequence[Any] | None = None,
        data_config: Mapping[str, Any] | None = None,
        feature_cols: Any = None,
        label_cols: Any = None,
    ) -> dict[str, Any]:
        """Judge rows, each once: "validation_loss", and "validation_" with the name of each metric.

        `num_steps` is how many steps are judged; None is every row. `sample_weight` and `callbacks` must be
        None. Other arguments are those of `fit`.
        """
        refuse_given("evaluate", sample_weight=sample_weight, callbacks=callbacks or None)
        judged = configured(first_steps(data, num_steps, batch_size, "num_steps"), data_config)
        scores = self._core.evaluate(
            judged, batch_size=batch_size, verbose=verbose, feature_cols=feature_cols, label_cols=label_cols
        )
        return {f"validation_{name}": value for name, value in scores.items() if name != "num_samples"}

    @as_orca
    def predict(
        self,
        data: Any,
        batch_size: int = 32,
        verbose: int = 1,
        steps: int | None = None,
        callbacks: Sequence[Any] | None = None,
        data_config: Mapping[str, Any] | None = None,
        feature_cols: Any = None,
        min_partition_num: int | None = None,
        output_cols: Any = None,
    ) -> Any:
        """The data with the outputs, as `prediction`.

        Args:
            data: A Spark DataFrame or an `XShards`.
            batch_size: Rows per call of the model.
            verbose: 0 shows no progress.
            steps, callbacks: Must be None: every row is scored.
            feature_cols: Columns of a DataFrame for the inputs.
            output_cols: Names for several outputs.
            data_config, min_partition_num: Without effect.
        """
        refuse_given("predict", steps=steps, callbacks=callbacks or None)
        return self._core.predict(
            data, batch_size=batch_size, verbose=verbose, feature_cols=feature_cols, output_cols=output_cols
        )

    def get_model(self, sample_input: Any = None) -> Any:
        return self._core.get_model()

    @as_orca
    def save(
        self,
        filepath: str,
        overwrite: bool = True,
        include_optimizer: bool = True,
        save_format: str | None = None,
        signatures: Any = None,
        options: Any = None,
    ) -> str:
        """Write the model: ".keras" and ".h5" are files, a name without a suffix a SavedModel.

        `include_optimizer` is without effect: `load` takes the weights alone. `save_format` must be None, or
        that of the suffix.
        """
        refuse_given("save", signatures=signatures, options=options)
        _check_file(filepath, overwrite, save_format)
        if filepath.endswith(".h5"):
            self._core.get_model().save(filepath)
        else:
            self._core.save(filepath)
        return filepath

    @as_orca
    def load(
        self,
        filepath: str,
        custom_objects: Any = None,
        compile: bool = True,  # noqa: A002 - Keras's name
        options: Any = None,
    ) -> None:
        """Take the weights of a model in a file; the model stays the one that `model_creator` makes."""
        refuse_given("load", options=options)
        self._core.load_weights(filepath)

    @as_orca
    def save_weights(
        self, filepath: str, overwrite: bool = True, save_format: str | None = None, options: Any = None
    ) -> str:
        """Write the weights to a ".weights.h5" file."""
        refuse_given("save_weights", options=options)
        _check_file(filepath, overwrite, save_format)
        self._core.get_model().save_weights(filepath)
        return filepath

    @as_orca
    def load_weights(
        self, filepath: str, by_name: bool = False, skip_mismatch: bool = False, options: Any = None
    ) -> None:
        """Read the weights of a file, in the order of the model's."""
        refuse_given(
            "load_weights", by_name=by_name or None, skip_mismatch=skip_mismatch or None, options=options
        )
        self._core.load_weights(filepath)

    @as_orca
    def save_checkpoint(self, checkpoint: str) -> str:
        self._core.save_checkpoint(checkpoint)
        return checkpoint

    @as_orca
    def load_checkpoint(self, checkpoint: str, sample_input: Any = None) -> None:
        """Go on from what `save_checkpoint` wrote, the optimizer included."""
        self._core.load_checkpoint(checkpoint)


def _check_file(filepath: str, overwrite: bool, save_format: str | None) -> None:
    named = "h5" if filepath.endswith(".h5") else "keras" if filepath.endswith(".keras") else "tf"
    if save_format not in (None, named):
        raise InvalidInput(
            f"save_format={save_format!r}: the name {filepath!r} means the format {named!r}.\n"
            "Hint: .keras, .h5 or no suffix at all say the format."
        )
    if not overwrite and os.path.exists(filepath):
        raise InvalidInput(f"{filepath} exists.\nHint: pass overwrite=True to replace it.")
