"""The shelf of models: every `put` is one more version."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kindler.registry import Registry, Spec
from kindler.shelves.shelf import Shelf
from kindler.store import Version

__all__ = ["Models"]

# Forms of other systems that a model can be written in.
_FORMS = Registry(
    "form", [Spec(name="mlflow", target="kindler.tracking.models:write", package="mlflow", extra="mlflow")]
)


class Models(Shelf):
    """Models, by name.

    Keras 3 and Keras 2 models, PyTorch modules, Kindler estimators and scikit-learn estimators are stored as
    they are; ONNX, OpenVINO, SavedModel and `.keras` files by their path, and come back as what predicts with
    them: ONNX and OpenVINO as callables. A function is a model too: the runtime calls it with the data and
    the verb.
    """

    shelf: ClassVar[str] = "models"

    def put(
        self,
        obj: Any,
        name: str,
        *,
        attributes: Mapping[str, Any] | None = None,
        tag: str | Sequence[str] | None = None,
        kind: str | None = None,
        trusted: bool = False,
        **options: Any,
    ) -> Version:
        """Store a model; see `Shelf.put`.

        Args:
            obj: The model, or the path of its file or folder.
            name: The name, without a version.
            attributes: What to remember of it; anything that JSON has.
            tag: A tag, or several, that move to the new version.
            kind: What to store it as, where several kinds could.
            trusted: Allow pickles, Lambda layers and SavedModels that touch files. The reader must too.
            **options: For PyTorch `init`, the arguments that its class is made with, or `example`, inputs for
                `torch.export`.
        """
        obj = Path(obj) if isinstance(obj, str) else obj
        return super().put(obj, name, attributes=attributes, tag=tag, kind=kind, trusted=trusted, **options)

    def export_mlflow(self, name: str, path: str | os.PathLike[str], *, trusted: bool = False) -> Path:
        """Write a version to a folder that is an MLflow model, with its signature and its requirements.

        `mlflow.pyfunc.load_model` and `mlflow models serve` load it, and predict as the stored model does.

        Args:
            name: The name, which may say which version.
            path: The folder, which must not be there.
            trusted: Allow what runs code when it is loaded. Who loads the folder must too, with
                `model_config={"trusted": True}`.

        Returns:
            The path.

        Raises:
            NotFoundError: There is no such name or version.
            AlreadyExistsError: The folder is there.
            MissingExtraError: mlflow is not installed.
        """
        written: Path = _FORMS.load("mlflow")(self.store, self.metadata(name), path, trusted=trusted)
        return written
