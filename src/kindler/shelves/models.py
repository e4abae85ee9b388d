"""The shelf of models: every `put` adds a version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kindler.errors import ConfigError
from kindler.registry import Registry, Spec
from kindler.shelves.shelf import Shelf
from kindler.store.names import parse_selector

if TYPE_CHECKING:
    from datetime import datetime

    from kindler.shelves.reproduction import Reproduction, Retraining
    from kindler.store.splits import Split
    from kindler.types import Data

# Forms of other systems that a model can be written in.
_FORMS = Registry(
    "form", [Spec(name="mlflow", target="kindler.tracking.models:write", package="mlflow", extra="mlflow")]
)


class Models(Shelf):
    """Models, by name.

    Keras 3 and Keras 2 models, PyTorch modules, Kindler estimators and scikit-learn estimators are stored
    directly; ONNX, OpenVINO, SavedModel and `.keras` files by their path, and are read as objects that
    predict: ONNX and OpenVINO as callables. A function is a model too: the runtime calls it with the data and
        the verb.
    """

    shelf: ClassVar[str] = "models"

    def split(
        self,
        name: str,
        *,
        canary: Mapping[int, float] | None = None,
        shadow: Mapping[int, float] | None = None,
    ) -> Split:
        """Let servers divide the requests of a tag; without shares, all go to its own version.

        Args:
            name: The name with a tag: `net@prod`.
            canary: Versions that answer a share of the requests: `{4: 0.1}` is a tenth of them.
            shadow: Versions to which a share of the requests is mirrored. Their responses are discarded;
                servers count how many differ.

        Returns:
            The split that now applies.

        Raises:
            ConfigError: The name has no tag, or a share is invalid.
        """
        from kindler.store.splits import Split, Splits

        selector = parse_selector(name)
        if not isinstance(selector.ref, str) or selector.back:
            raise ConfigError(f"{name!r} has no tag.\nHint: split('net@prod', canary={{4: 0.1}}).")
        self.metadata(name)
        split = Split(self.bucket, selector.name, selector.ref, dict(canary or {}), dict(shadow or {}))
        for number in {*split.canary, *split.shadow}:
            self.metadata(selector.name, version=number)
        Splits(self.store).put(split)
        return split

    def splits(self, name: str) -> dict[str, Split]:
        """How the requests of a model's tags are divided, by tag."""
        from kindler.store.splits import Splits

        return {split.tag: split for split in Splits(self.store).list(self._address(name))}

    def _protected(self, name: str) -> set[int]:
        splits = self.splits(name).values()
        return super()._protected(name).union(*((*split.canary, *split.shadow) for split in splits))

    def reproduce(
        self,
        name: str,
        *,
        trusted: bool = False,
        data: Data | None = None,
        validation_data: Data | None = None,
        seed: int | None = None,
        workers: int | None = None,
    ) -> Reproduction:
        """Train a stored estimator again from its record, and compare weights and metrics to the bit.

        Files are compared first: those that are missing or have changed are named before anything is trained.
        Processes of this session do the work; `kindler models reproduce` is a fresh one.

        Args:
            name: The name, optionally with a version.
            trusted: Its recipe is code, which this runs: pass True only for versions of people whose programs
                you would run.
            data: The data, if the record cannot read it again: a Spark DataFrame that is not just files,
                arrays, your own batches. Its fingerprint is compared.
            validation_data: The same of the validation data.
            seed: Another seed than the recorded one.
            workers: Another number of workers.

        Raises:
            ConfigError: There is no record or recipe, or the record cannot read the data again.
            DataError: Files are missing or have changed.
            UntrustedError: `trusted` was not passed.
        """
        from kindler.shelves.reproduction import reproduce

        return reproduce(
            self.store,
            self.metadata(name),
            trusted=trusted,
            data=data,
            validation_data=validation_data,
            seed=seed,
            workers=workers,
        )

    def retrain(
        self,
        name: str,
        *,
        holdout: Data,
        trusted: bool = False,
        data: Data | None = None,
        since: datetime | None = None,
        tag: str | None = "candidate",
    ) -> Retraining:
        """Train by a version's recipe on newer data, and store the result as the newest version.

        It begins from the weights that the recipe began from. Both versions are evaluated on the same rows;
        the metrics become the attribute `on_holdout`. `split` can then give the new one a share of requests.

        Args:
            name: The name, optionally with a version.
            holdout: The rows to evaluate both versions on; neither should have been trained on them.
            trusted: The recipe is code, which this runs: pass True only for versions of people whose programs
                you would run.
            data: The data; None takes the recorded paths as they are now.
            since: Take only files that were written after this time.
            tag: The tag that moves to the new version.

        Raises:
            ConfigError: There is no record or recipe, or the record does not say where the data is.
            DataError: No file is newer.
            UntrustedError: `trusted` was not passed.
        """
        from kindler.shelves.reproduction import retrain

        return retrain(
            self, self.metadata(name), holdout=holdout, trusted=trusted, data=data, since=since, tag=tag
        )

    def export_mlflow(self, name: str, path: str | os.PathLike[str], *, trusted: bool = False) -> Path:
        """Write a version to a folder as an MLflow model, with its signature and its requirements.

        `mlflow.pyfunc.load_model` and `mlflow models serve` load it, and predict as the stored model does.

        Args:
            name: The name, optionally with a version.
            path: The folder, which must not exist.
            trusted: Allow what runs code when it is loaded. Loading the folder then needs it, too:
                `model_config={"trusted": True}`.

        Returns:
            The path.

        Raises:
            AlreadyExistsError: The folder exists.
            MissingExtraError: mlflow is not installed.
        """
        write, version, folder = _FORMS.load("mlflow"), self.metadata(name), Path(path)
        with self.store.files(version) as files:
            write(version, files, folder, trusted=trusted)
        return folder
