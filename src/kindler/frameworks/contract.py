"""The contract between the training loop and a framework: one replica of the user's model.

Each framework has one class that keeps it; `registry.py` finds it by name. The loop decides when a step, an
epoch or an evaluation happens; the replica decides how. No framework is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kindler.frameworks.state_format import Buffer

__all__ = ["Batch", "Keeps", "Replica", "Steps", "Tallies"]

Array = np.ndarray[Any, np.dtype[Any]]


class Batch(Protocol):
    """The rows of one step: this rank's arrays, and how many rows all ranks have in this step."""

    @property
    def features(self) -> tuple[Array, ...]:
        """One array a feature column, rows first."""

    @property
    def labels(self) -> tuple[Array, ...]:
        """One array a label column, rows first."""

    @property
    def rows(self) -> int:
        """Rows of this rank; 0 when it only takes part."""

    @property
    def global_rows(self) -> int:
        """Rows of all ranks together."""

    @property
    def where(self) -> Callable[[int], int | str] | None:
        """Names a row of this rank's by where it stood in the data; None where that is not known."""


class Steps(Protocol):
    """How a replica moves. Between ranks every call but `predict` is made by all, in the same order."""

    def attach(self, group: Any) -> None:
        """Start from rank 0's weights and agree on every gradient from now on; at most once."""

    def as_given(self) -> None:
        """Take from the user's own model what it says besides weights (what is frozen), not from a state."""

    def begin_epoch(self, epoch: int) -> None:
        """Prepare for the epoch of this number: randomness depends on it, so a resumed epoch is the same."""

    def train_step(self, batch: Batch) -> None:
        """One optimizer step with the gradient of the mean over the rows of all ranks."""

    def merge_buffers(self) -> None:
        """Make what training changed besides weights the same on all ranks, before it is judged."""

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        """Move per-epoch schedules; `logs` has the epoch's figures."""

    def eval_step(self, batch: Batch) -> None:
        """Judge a batch without learning from it."""

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        """The model's outputs for these rows, one array an output, rows first."""


class Tallies(Protocol):
    """What a replica counted: sums and metric states, merged over ranks without means of means."""

    def take_tallies(self) -> bytes:
        """This rank's sums and metric states since they were last taken; counting starts anew."""

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        """All ranks' tallies as numbers: "loss", each metric, "num_samples"."""

    def running_loss(self) -> float:
        """This rank's mean loss since tallies were last taken; cheap, for progress; NaN before any row."""

    def running_metrics(self) -> dict[str, float]:
        """Those metrics since tallies were last taken that are cheap to tell; for progress."""

    def loss_sums(self) -> tuple[float, float]:
        """This rank's summed loss and its weight since tallies were last taken; the quotient is the mean."""

    def learning_rate(self) -> float:
        """The rate of the next step (of the first parameter group)."""


class Keeps(Protocol):
    """A replica as bytes: everything that the next step depends on; loading it executes no code.

    Between epochs `state` of any rank is enough. In the middle of one each rank has a `local_state` besides,
    to be loaded after `attach` and `begin_epoch`.
    """

    def state(self) -> bytes:
        """Weights, optimizer, schedule, randomness, epoch and step."""

    def freeze(self) -> Callable[[], Sequence[Buffer]]:
        """A copy of what `state` has, made now; the function makes the bytes later, on any thread."""

    def settle(self) -> None:
        """Wait until what was frozen is copied, before anybody but the replica itself changes weights."""

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """Go on from `state`; with `weights_only_model` only the model is taken from it."""

    def local_state(self) -> bytes:
        """What this rank alone has within an epoch: randomness, tallies so far, buffers; counting goes on."""

    def load_local_state(self, data: bytes) -> None:
        """Go on from `local_state` of the same rank, in the epoch that has just begun."""

    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None:
        """The same where other ranks were there: `states` are theirs, `size` is how many ranks there are now.

        Tallies of all count once, buffers are merged, and randomness begins anew.
        """


class Replica(Steps, Tallies, Keeps, Protocol):
    """One rank's copy of the model, with all that trains it.

    Attributes:
        epoch: Epochs begun since the model was new.
        step: Optimizer steps since then.
        device: Where it computes.
        output_names: What the model called the outputs that it returned last; None where they have no names.
    """

    epoch: int
    step: int
    device: Any
    output_names: tuple[str, ...] | None
