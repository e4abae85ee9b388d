"""What ranks exchange, and through what: the words that frameworks and syncs have in common.

A replica (`frameworks/`) makes gradients, a sync (`sync/`) brings them together; neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Gradients(NamedTuple):
    """What a replica learned from its rows of one step.

    Attributes:
        arrays: The gradient of the mean over this rank's rows, one array a parameter; zeros for a parameter
            that they do not reach, and where there are no rows.
        weight: What that mean counts for beside those of other ranks: the rows, or the sum of their weights.
            The mean over all ranks' rows is the mean of `arrays` by `weight`.
    """

    arrays: list[Array]
    weight: float


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


class Collective(Protocol):
    """One rank's end of a group that exchanges numpy arrays.

    Every rank makes the same calls in the same order, with arrays of the same shapes and dtypes. Arguments
    are never modified, results are fresh arrays, and all ranks get bit-identical ones. If a rank is missing,
    the others raise `SyncTimeoutError` with its number within the set time; they never hang.

    Attributes:
        rank: This rank.
        size: How many there are.
        waited_s: Seconds that this rank has waited for others so far.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def waited_s(self) -> float: ...

    def sum(self, arrays: Sequence[Array]) -> list[Array]:
        """The sum over ranks, in the arrays' own dtypes."""

    def mean(self, arrays: Sequence[Array], weight: float) -> list[Array]:
        """The mean over ranks, each counting by its weight.

        A rank of weight 0 counts for nothing, whatever its arrays hold; zeros where no rank weighs anything.
        """

    def broadcast(self, arrays: Sequence[Array], src: int = 0) -> list[Array]:
        """The arrays of the rank `src`, on every rank."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def close(self) -> None:
        """Leave the group. Idempotent."""


class GradientExchange:
    """Along which a replica exchanges gradients within its own steps; of this one nothing is open."""

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others so far."""
        return 0.0

    def close(self) -> None:
        """Leave the others. Idempotent."""


def share_bytes(collective: Collective, data: bytes, src: int = 0) -> bytes:
    """The bytes of the rank `src`, on every rank."""
    [length] = collective.broadcast([np.array([len(data)], np.int64)], src)
    mine = np.frombuffer(data, np.uint8) if collective.rank == src else np.empty(int(length[0]), np.uint8)
    [whole] = collective.broadcast([mine], src)
    return whole.tobytes()


_gather: ContextVar[Callable[[Any], Any] | None] = ContextVar("gather", default=None)


def all_gather(tensor: Any) -> Any:
    """The rows of all workers of a training step, in the order of workers; gradients flow back to each.

    For a loss that compares rows with one another, as contrastive losses do: a worker has only its part of a
    step's rows. Workers may have different numbers of rows, or none. All of them must call it equally often
    and in the same order, with tensors that differ in nothing but their rows. With one worker, in evaluation
    and outside of Kindler's training it returns what it is given.

    Args:
        tensor: This worker's rows, along the first dimension; of the framework that is trained.
    """
    gather = _gather.get()
    return tensor if gather is None else gather(tensor)


@contextmanager
def gathering(gather: Callable[[Any], Any] | None) -> Iterator[None]:
    """Within it `all_gather` is this function; None stands for a worker that is alone."""
    before = _gather.set(gather)
    try:
        yield
    finally:
        _gather.reset(before)
