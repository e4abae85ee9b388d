"""The framework contract: one class, a replica of the user's model in one process; rows: `registry.py`.

A framework implements `Replica`; `base.BaseReplica` derives the rest. An ability that only some frameworks
have (exports, row weights, gradient exchange within a step) is a method of `BaseReplica` that the framework
overrides and its row declares. No framework is imported.
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
    """What the driver must know about a spec before anything runs.

    Attributes:
        labels: Whether training and evaluation need labels; "found": if the data has any.
        gpus: Whether the installed framework could compute on a GPU.
        process_group: Whether workers join `torch.distributed` before they make the model.
        has_instance: Whether the user holds an object that training changes, not just a way to make it.
        environment: Variables to set in workers before the framework is imported.
        adapt: Converts data in a form of the framework's own into one that Kindler reads.
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
        rows: Number of rows.
        outputs: One array per output, rows first.
        names: The model's names for them; None if they have none.
    """

    rows: int
    outputs: list[Array]
    names: tuple[str, ...] | None = None


class Replica(Protocol):
    """The user's model in one process, made as `cls(spec, device=..., rank=..., seed=...)`.

    All ranks make the same calls in the same order. In one process `train_step` equals `gradients` followed
    by `apply`.

    Attributes:
        epoch: Epochs begun since the model was new.
        step: Optimizer steps since then.
        epoch_rows: Rows that this rank has trained on in this epoch.
    """

    epoch: int
    step: int
    epoch_rows: int

    @classmethod
    def make_spec(cls, **options: Any) -> Any:
        """Check the user's arguments and return them in any form the framework likes.

        Raises:
            ConfigError: They cannot work; lists every problem.
        """

    @classmethod
    def dumps(cls, spec: Any) -> bytes:
        """Return the spec as bytes, for workers and files."""

    @classmethod
    def loads(cls, data: bytes) -> Any:
        """Return the spec from those bytes."""

    @classmethod
    def facts(cls, spec: Any) -> Facts:
        """Return what the driver must know about the spec."""

    @classmethod
    def complaints(cls, spec: Any, use: Use, value: Any = None) -> list[str]:
        """Return the reasons, as far as the driver knows, why the spec is unfit for a use.

        `value` is the data for "data"; for "division" it is what the user says the optimizer's work can be
        divided into: "elements", "parameters" or None.
        """

    def variables(self, *groups: str) -> Variables:
        """Return copies of everything the next step depends on, or of these groups."""

    def assign(self, variables: Mapping[str, Mapping[str, Array]]) -> None:
        """Overwrite the named variables."""

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch. Randomness depends on its number, so that a resumed epoch is the same."""

    def train_step(self, batch: Batch) -> None:
        """Make a whole optimizer step on the mean over the rows."""

    def gradients(self, batch: Batch) -> Gradients:
        """Return and count the gradients of this rank's rows; no parameter moves."""

    def apply(self, gradients: Sequence[Array]) -> None:
        """Make one optimizer step with these gradients, in the order of the parameters; increments `step`."""

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        """Advance per-epoch schedules; `logs` has the epoch's metrics."""

    def eval_step(self, batch: Batch) -> None:
        """Count the loss and metrics of a batch without training."""

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        """Return the outputs for these rows, one array per output, rows first."""

    def learning_rate(self) -> float:
        """Return the learning rate of the next step (of the first parameter group)."""
