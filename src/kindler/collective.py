"""What ranks exchange, and through what: the vocabulary that frameworks and syncs share.

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
        arrays: The gradient of the mean over this rank's rows, one array per parameter; zeros for parameters
            that the rows do not reach, and if there are no rows.
        weight: The weight of that mean among all ranks: the rows, or the sum of their weights. The mean over
            all ranks' rows is the mean of `arrays` by `weight`.
    """

    arrays: list[Array]
    weight: float


class Batch(Protocol):
    """The rows of one step on this rank."""

    @property
    def features(self) -> tuple[Array, ...]:
        """One array per feature column, rows first."""

    @property
    def labels(self) -> tuple[Array, ...]:
        """One array per label column, rows first."""

    @property
    def rows(self) -> int:
        """Rows of this rank; 0 if it only takes part."""

    @property
    def global_rows(self) -> int:
        """Rows of all ranks together."""

    @property
    def where(self) -> Callable[[int], int | str] | None:
        """Names a row of this rank by its place in the data; None if that is unknown."""


class Collective(Protocol):
    """One rank's end of a group that exchanges numpy arrays.

    Every rank makes the same calls in the same order, with arrays of the same shapes and dtypes. Arguments
    are never modified, results are fresh arrays, and all ranks get bit-identical ones. If a rank is missing,
    the others raise `SyncTimeoutError` with its number in time; they never hang.

    Attributes:
        rank: This rank.
        size: The number of ranks.
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
        """The mean over ranks, weighted.

        A rank of weight 0 is ignored, whatever its arrays hold; zeros if all weights are 0.
        """

    def broadcast(self, arrays: Sequence[Array], src: int = 0) -> list[Array]:
        """The arrays of the rank `src`, on every rank."""

    def barrier(self) -> None:
        """Wait for every rank."""

    def close(self) -> None:
        """Leave the group. Idempotent."""


class GradientExchange:
    """How a replica exchanges gradients within its own steps; this one does nothing."""

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others so far."""
        return 0.0

    def close(self) -> None:
        """Leave the others. Idempotent."""


def share_bytes(collective: Collective, data: bytes, src: int = 0) -> bytes:
    [length] = collective.broadcast([np.array([len(data)], np.int64)], src)
    mine = np.frombuffer(data, np.uint8) if collective.rank == src else np.empty(int(length[0]), np.uint8)
    [whole] = collective.broadcast([mine], src)
    return whole.tobytes()


_gather: ContextVar[Callable[[Any], Any] | None] = ContextVar("gather", default=None)


def all_gather(tensor: Any) -> Any:
    """Return the rows of all workers of a training step, in worker order; gradients flow back to each.

    For losses that compare rows with one another, such as contrastive losses: a worker has only a part of a
    step's rows. Workers may have different numbers of rows, or none. All must call it equally often and in
    the same order, with tensors that differ only in their rows. With one worker, in evaluation and outside of
    Kindler's training it returns its argument.

    Args:
        tensor: This worker's rows, along the first dimension; a tensor of the framework in use.
    """
    gather = _gather.get()
    return tensor if gather is None else gather(tensor)


@contextmanager
def gathering(gather: Callable[[Any], Any] | None) -> Iterator[None]:
    """Make `all_gather` call this function inside the block; None for a single worker."""
    before = _gather.set(gather)
    try:
        yield
    finally:
        _gather.reset(before)
