"""The shelf of models: every `put` is one more version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kindler.shelves.functions import Functions
from kindler.store import Version

__all__ = ["Models"]


class Models(Functions):
    """Models, by name.

    Keras 3 and Keras 2 models, PyTorch modules, Kindler estimators and scikit-learn estimators are stored as
    they are; ONNX, OpenVINO, SavedModel and `.keras` files by their path. A function is a model too: the
    runtime calls it with the data and the verb.
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
