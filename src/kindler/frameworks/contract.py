"""What a framework is: one class, a replica of the user's model in one process. Its row is in `registry.py`.

A framework writes the methods of `Replica`; `base.BaseReplica` has defaults for some of them and derives all
else from them: states as bytes, weights, what several ranks counted, buffers that ranks merge, resuming. An
ability that only some frameworks have (exports, weights of rows, gradients that are exchanged within a step)
is a method of `BaseReplica`, too, which the framework overrides and its row names. No framework is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from kindler.collective import Array, Batch, Gradients

__all__ = ["Array", "Batch", "Facts", "Gradients", "Replica", "Scored", "Use", "Variables"]

Variables: TypeAlias = dict[str, dict[str, Array]]
"""Arrays by name in the groups "parameters" (what gradients move), "buffers" (what else training changes in
the model) and "optimizer"."""

Use: TypeAlias = Literal["train", "judge", "data", "row_weights", "several", "server", "parts", "division"]
"""What a model may be unfit for: to be trained or judged at all; this data; weights of rows; several workers;
a parameter server; several of them that share the parameters; an optimizer whose work workers divide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the driver must know of a spec before anything runs.

    Attributes:
        labels: Whether training and judging takes labels; "found": where there are some.
        gpus: Whether the framework that is installed here could compute on a GPU.
        process_group: Whether workers join `torch.distributed` before they make the model.
        has_instance: Whether the user holds something that training changes, rather than a way to make it.
        environment: Variables that must be set in workers before the framework is imported.
        adapt: Makes of data in a form of the framework's own one that Kindler takes.
    """

    labels: bool | Literal["found"] = True
    gpus: bool = False
    process_group: bool = False
    has_instance: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    adapt: Callable[[Any], Any] = lambda data: data


@dataclass(frozen=True, slots=True)
class Scored:
    """The outputs of a batch.

    Attributes:
        rows: How many rows it had.
        outputs: One array an output, rows first.
        names: What the model called them; None where they have no names.
    """

    rows: int
    outputs: list[Array]
    names: tuple[str, ...] | None = None


class Replica(Protocol):
    """The user's model in one process, made as `cls(spec, device=..., rank=..., seed=...)`.

    Several ranks make the same calls in the same order. `gradients` and `apply` are together what
    `train_step` is in one process.

    Attributes:
        epoch: Epochs begun since the model was new.
        step: Optimizer steps since then.
        epoch_rows: Rows of this rank that the epoch has trained on.
    """

    epoch: int
    step: int
    epoch_rows: int

    @classmethod
    def make_spec(cls, **options: Any) -> Any:
        """What the user gave, in whatever form the framework likes.

        Raises:
            ConfigError: It cannot work; says all that is wrong with it.
        """

    @classmethod
    def dumps(cls, spec: Any) -> bytes:
        """The spec as bytes, for workers and files."""

    @classmethod
    def loads(cls, data: bytes) -> Any:
        """The spec out of those bytes."""

    @classmethod
    def facts(cls, spec: Any) -> Facts:
        """What the driver must know of it."""

    @classmethod
    def complaints(cls, spec: Any, use: Use, value: Any = None) -> list[str]:
        """Why the spec is not fit for a use, as far as the driver knows.

        `value` is the data for "data", and for "division" what the user says that the optimizer's work can be
        divided into: "elements", "parameters" or None.
        """

    def variables(self, *groups: str) -> Variables:
        """Copies of all that the next step depends on, or of these groups of it."""

    def assign(self, variables: Mapping[str, Mapping[str, Array]]) -> None:
        """Overwrite those of the variables that are named."""

    def begin_epoch(self, epoch: int) -> None:
        """Randomness depends on the epoch's number, so that a resumed epoch is the same."""

    def train_step(self, batch: Batch) -> None:
        """A whole optimizer step on the mean over the rows."""

    def gradients(self, batch: Batch) -> Gradients:
        """What this rank's rows say; counts them, and moves no parameter."""

    def apply(self, gradients: Sequence[Array]) -> None:
        """One step of the optimizer with these gradients, in the order of the parameters; counts `step`."""

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        """Move per-epoch schedules; `logs` has the epoch's metrics."""

    def eval_step(self, batch: Batch) -> None:
        """Count the loss and metrics of a batch, learning nothing."""

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        """The outputs for these rows, one array an output, rows first."""

    def learning_rate(self) -> float:
        """The rate of the next step (of the first parameter group)."""
