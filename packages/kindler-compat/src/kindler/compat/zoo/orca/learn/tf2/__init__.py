"""`zoo.orca.learn.tf2`: Keras models made by creator functions."""

from __future__ import annotations

import os
from typing import Any

from kindler.compat.flat import FlatEstimator as CoreEstimator
from kindler.compat.zoo.orca import InvalidInputError, refuse_given
from kindler.compat.zoo.orca.learn.base import (
    OrcaEstimator,
    check_backend,
    check_config,
    configured,
    first_steps,
    workers_of,
)

__all__ = ["Estimator", "TensorFlow2Estimator"]

_BACKENDS = ("tf2", "ray", "spark", "horovod")
_NOT_METRICS = ("epoch", "steps", "num_samples", "seconds", "rows_per_s", "val_num_samples")


class Estimator(OrcaEstimator):
    """Made by `from_keras`. Data is also a function of `(config, batch_size)` that returns a
    `tf.data.Dataset`; it gets its worker's share of `batch_size`.
    """

    def __init__(self, core: CoreEstimator) -> None:
        self._core = core

    @staticmethod
    def from_keras(
        *,
        model_creator: Any = None,
        config: Any = None,
        verbose: bool = False,
        workers_per_node: int = 1,
        compile_args_creator: Any = None,
        backend: str = "ray",
        cpu_binding: bool = False,
        log_to_driver: bool = True,
        model_dir: Any = None,
        **kwargs: Any,
    ) -> Estimator:
        """All backends compute the same. `verbose`, `cpu_binding` and `log_to_driver` are without effect."""
        check_backend(backend, _BACKENDS)
        refuse_given("from_keras", **kwargs)
        check_config(config, "fit/evaluate")
        if not callable(model_creator):
            raise InvalidInputError(
                f"model_creator must be a function of config; received {model_creator!r}."
            )
        made = CoreEstimator.from_keras(
            model_creator,
            config=config,
            compile_args=compile_args_creator,
            workers=workers_of(workers_per_node),
            model_dir=model_dir,
        )
        return Estimator(made)

    @staticmethod
    def latest_checkpoint(checkpoint_dir: str) -> str | None:
        return CoreEstimator.latest_checkpoint(checkpoint_dir)

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        batch_size: int = 32,
        verbose: int = 1,
        callbacks: Any = None,
        validation_data: Any = None,
        class_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_freq: Any = 1,
        data_config: Any = None,
        feature_cols: Any = None,
        label_cols: Any = None,
    ) -> dict[str, Any]:
        """Returns what Keras's history has: "epochs", "steps", "verbose", and a list of each metric."""
        evaluated = first_steps(validation_data, validation_steps, batch_size, "validation_steps")
        rows = self._core.fit(
            configured(data, data_config),
            epochs=epochs,
            batch_size=batch_size,
            verbose=verbose,
            callbacks=callbacks,
            validation_data=configured(evaluated, data_config),
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

    def evaluate(
        self,
        data: Any,
        batch_size: int = 32,
        num_steps: int | None = None,
        verbose: int = 1,
        sample_weight: Any = None,
        callbacks: Any = None,
        data_config: Any = None,
        feature_cols: Any = None,
        label_cols: Any = None,
    ) -> dict[str, Any]:
        """Every row counts once. `sample_weight` and `callbacks` must be None."""
        refuse_given("evaluate", sample_weight=sample_weight, callbacks=callbacks or None)
        evaluated = configured(first_steps(data, num_steps, batch_size, "num_steps"), data_config)
        scores = self._core.evaluate(
            evaluated,
            batch_size=batch_size,
            verbose=verbose,
            feature_cols=feature_cols,
            label_cols=label_cols,
        )
        return {f"validation_{name}": value for name, value in scores.items() if name != "num_samples"}

    def predict(
        self,
        data: Any,
        batch_size: int = 32,
        verbose: int = 1,
        steps: int | None = None,
        callbacks: Any = None,
        data_config: Any = None,
        feature_cols: Any = None,
        min_partition_num: int | None = None,
        output_cols: Any = None,
    ) -> Any:
        """The data with the outputs, as `prediction`. `steps` and `callbacks` must be None;
        `data_config` and `min_partition_num` are without effect.
        """
        refuse_given("predict", steps=steps, callbacks=callbacks or None)
        return self._core.predict(
            data, batch_size=batch_size, verbose=verbose, feature_cols=feature_cols, output_cols=output_cols
        )

    def get_model(self, sample_input: Any = None) -> Any:
        return self._core.get_model()

    def save(
        self,
        filepath: str,
        overwrite: bool = True,
        include_optimizer: bool = True,
        save_format: str | None = None,
        signatures: Any = None,
        options: Any = None,
    ) -> str:
        """`include_optimizer` is without effect: `load` takes the weights alone. `save_format` must be None,
        or that of the suffix.
        """
        refuse_given("save", signatures=signatures, options=options)
        _check_file(filepath, overwrite, save_format)
        if filepath.endswith(".h5"):
            self._core.get_model().save(filepath)
        else:
            self._core.save(filepath)
        return filepath

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

    def save_weights(
        self, filepath: str, overwrite: bool = True, save_format: str | None = None, options: Any = None
    ) -> str:
        refuse_given("save_weights", options=options)
        _check_file(filepath, overwrite, save_format)
        self._core.get_model().save_weights(filepath)
        return filepath

    def load_weights(
        self, filepath: str, by_name: bool = False, skip_mismatch: bool = False, options: Any = None
    ) -> None:
        """Read the weights of a file, in the order of the model's."""
        refused = {"by_name": by_name or None, "skip_mismatch": skip_mismatch or None, "options": options}
        refuse_given("load_weights", **refused)
        self._core.load_weights(filepath)

    def save_checkpoint(self, checkpoint: str) -> str:
        self._core.save_checkpoint(checkpoint)
        return checkpoint

    def load_checkpoint(self, checkpoint: str, sample_input: Any = None) -> None:
        self._core.load_checkpoint(checkpoint)


TensorFlow2Estimator = Estimator


def _check_file(filepath: str, overwrite: bool, save_format: str | None) -> None:
    named = "h5" if filepath.endswith(".h5") else "keras" if filepath.endswith(".keras") else "tf"
    if save_format not in (None, named):
        raise InvalidInputError(
            f"save_format={save_format!r}: the name {filepath!r} means the format {named!r}.\n"
            "Hint: .keras, .h5 or no suffix at all set the format."
        )
    if not overwrite and os.path.exists(filepath):
        raise InvalidInputError(f"{filepath} exists.\nHint: pass overwrite=True to replace it.")
