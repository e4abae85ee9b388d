"""The types that frameworks and the rest of Kindler exchange; `base.BaseReplica` is the contract itself.

No framework is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kindler.collective import Array, Batch, Gradients

__all__ = ["Array", "Batch", "Facts", "Gradients", "Scored", "Use", "Variables"]

Variables: TypeAlias = dict[str, dict[str, Array]]
"""Arrays by name in the groups "parameters" (what gradients move), "buffers" (what else training changes in
the model) and "optimizer"."""

Use: TypeAlias = Literal["train", "judge", "data", "row_weights", "several", "server", "parts", "division"]
"""What a model may be unfit for: to be trained or judged at all; this data; weights of rows; several workers;
a parameter server; several of them that share the parameters; an optimizer whose work workers divide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the driver must know about a spec before anything runs.

    Attributes:
        labels: Whether training and evaluation need labels; "optional": they use any that the data has.
        gpus: Whether the installed framework could compute on a GPU.
        process_group: Whether workers join `torch.distributed` before they make the model.
        has_instance: Whether the user holds an object that training changes, not just a way to make it.
        environment: Variables to set in workers before the framework is imported.
        adapt: Converts data in a form of the framework's own into one that Kindler reads.
    """

    labels: bool | Literal["optional"] = True
    gpus: bool = False
    process_group: bool = False
    has_instance: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    adapt: Callable[[Any], Any] = lambda data: data


@dataclass(frozen=True, slots=True)
class Scored:
    """The outputs of a batch.

    Attributes:
        rows: Number of rows.
        outputs: One array per output, rows first.
        names: The model's names for them; None if they have none.
    """

    rows: int
    outputs: list[Array]
    names: tuple[str, ...] | None = None
