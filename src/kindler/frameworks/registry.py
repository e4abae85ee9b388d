"""The table of frameworks: one is a row, which says what it can do, and its code loads on first use.

Importing this module loads no framework. What the loaded classes promise is in `contract.py`. Rows of other
distributions come from the entry points "kindler.frameworks".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kindler.registry import Registry, Spec

__all__ = ["FRAMEWORKS", "FrameworkSpec", "framework_of_kind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameworkSpec(Spec):
    """A framework, and what it can do: nobody needs to ask for its name.

    Attributes:
        can: "train", "predict".
        loop: Who makes the steps: Kindler ("step", a `Stepper`), or the framework itself ("fit", a `Fitter`).
        callbacks: The packages whose `Callback` classes its users' callbacks are derived from.
        row_weights: Whether it takes a weight per row, and weights of classes.
        live: Whether the user may change the model between runs, so that its own state counts.
        model_kinds: The kinds, in the table of models, that its models are stored as.
    """

    can: frozenset[str] = frozenset({"train", "predict"})
    loop: Literal["step", "fit"] = "step"
    callbacks: tuple[str, ...] = ("kindler",)
    row_weights: bool = False
    live: bool = False
    model_kinds: tuple[str, ...] = ()


FRAMEWORKS = Registry(
    "framework",
    [
        FrameworkSpec(
            name="torch",
            target="kindler.frameworks.torch.replica:TorchReplica",
            package="torch",
            extra="torch",
            preload="kindler.frameworks.torch.replica:preload",
            model_kinds=("torch",),
        ),
        FrameworkSpec(
            name="keras",
            target="kindler.frameworks.keras.replica:KerasReplica",
            package="keras",
            extra="keras",
            preload="kindler.frameworks.keras.replica:preload",
            loop="fit",
            callbacks=("keras", "tf_keras"),
            row_weights=True,
            live=True,
            model_kinds=("keras", "tf_keras"),
        ),
    ],
    group="kindler.frameworks",
)


def framework_of_kind(kind: str) -> str | None:
    """The framework whose models are stored as this kind of model; None where there is none."""
    return _of_kind(kind, FRAMEWORKS.built_in) or _of_kind(
        kind, FRAMEWORKS.names
    )  # entry points take a while


def _of_kind(kind: str, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if kind in FRAMEWORKS.spec(name).model_kinds), None)
