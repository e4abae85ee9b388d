"""Steps that all workers take together, out of streams that each of them reads by itself.

Nobody knows ahead how many rows the others will bring. `AgreedSteps` asks for a few steps at a time, so that
every step knows the rows of all. `NumberedSteps` serves a framework that weighs by rows itself, and asks for
steps by number from threads of its own, where no worker may wait for another.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Sequence

import numpy as np

from kindler.data.batch_format import Part
from kindler.data.batches import Batch, Rows
from kindler.data.columns import Array
from kindler.data.spool import Layout
from kindler.errors import DataError
from kindler.group import Group
from kindler.train.loader_source import Agreed, Peeking, Reader, agree

_WINDOW = 8


class _Opened(Rows):
    """What both kinds of steps have in common. Nobody has counted the rows, so that no run can resume in the
    middle of an epoch."""

    def __init__(self, worker: Group, reader: Reader, *, what: str, bounded: bool, number: int) -> None:
        self._worker, self._reader, self._what = worker, reader, what
        self._begun: tuple[int, Peeking] | None = None
        if not bounded:
            reader.refuse_endless()
        parts = self._begin(number)
        self._begun = (number, parts)
        self._agreed: Agreed = agree(worker, reader, parts.peek(), what=what)
        form = self._agreed.form
        self.features, self.labels = form.features, form.labels
        self.by_name = form.by_name
        self.label_shapes = [self.layout[name][1] for name in self.labels]

    @property
    def layout(self) -> Layout:
        """dtype and row shape of each array."""
        return self._agreed.layout

    def close(self) -> None:
        """End the pass that is open, and what it started."""
        if self._begun is not None:
            self._begun[1].close()
            self._begun = None
        self._reader.close()

    def _begin(self, number: int) -> Peeking:
        """The pass of this number, from its beginning; perhaps the one that was begun already."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] == number:
            return begun[1]
        if begun is not None:
            begun[1].close()
        return Peeking(self._reader.parts(number))


class AgreedSteps(_Opened):
    """Steps whose rows are known on all workers before they are made.

    Attributes:
        steps: None: when a pass is over shows at its end.
        expected: Steps of a pass, where the loaders say so.

    Args:
        worker: This worker.
        reader: Its batches.
        what: How to call the data in complaints.
        bounded: Whether epochs have a number of steps of their own.
        number: The pass that will be asked for first, most likely.
    """

    steps: int | None = None

    def __init__(self, worker: Group, reader: Reader, *, what: str, bounded: bool, number: int) -> None:
        super().__init__(worker, reader, what=what, bounded=bounded, number=number)
        lengths = self._agreed.lengths
        self.expected = None if lengths is None else max(lengths)
        self._through: Generator[Batch, None, None] | None = None

    def stretch(self, epoch: int, *, done: int = 0, steps: int | None = None) -> Generator[Batch, None, None]:
        """The steps of an epoch: one pass, or `steps` steps that go on where the last epoch ended."""
        if steps is None:
            yield from self._pass(epoch)
            return
        if self._through is None:
            self._through = self._passes(epoch)
        yield from itertools.islice(self._through, steps - done)

    def close(self) -> None:
        """End what is open."""
        if self._through is not None:
            self._through.close()
            self._through = None
        super().close()

    def _passes(self, number: int) -> Generator[Batch, None, None]:
        for following in itertools.count(number):
            yield from self._pass(following, is_epoch=False)

    def _pass(self, number: int, *, is_epoch: bool = True) -> Generator[Batch, None, None]:
        parts, made, window = self._begin(number), 0, 1
        try:
            while True:
                mine = list(itertools.islice(parts, window))
                window = min(2 * window, _WINDOW)  # the first step does not wait for many
                totals, over = self._everybodys(mine, ended=parts.ended)
                last = int(totals.nonzero()[0][-1]) if over and is_epoch and totals.any() else -1
                for step, total in enumerate(totals.tolist()):
                    if total:  # a step in which nobody has a row is none
                        made += 1
                        yield _batch(mine[step] if step < len(mine) else None, total, ends=step == last)
                if over:
                    break
        finally:
            parts.close()
        if not made:
            raise DataError(
                f"{self._what} gave no batch in pass {number}.\n"
                "Hint: what can be read only once must be made anew by a function, for each epoch."
            )

    def _everybodys(self, mine: Sequence[Part | None], *, ended: bool) -> tuple[Array, bool]:
        """Rows of all workers in each of the next few steps, and whether nobody has any after them."""
        own = np.zeros(_WINDOW + 1, np.int64)
        own[: len(mine)] = [0 if part is None else part.rows for part in mine]
        own[_WINDOW] = ended
        told = np.asarray(self._worker.total(own.tolist()), np.int64)
        return told[:_WINDOW], bool(told[_WINDOW] == self._worker.size)


class NumberedSteps(_Opened):
    """Steps by their number; how many a pass has is known before the first.

    Where no loader says how many batches it has, each worker reads through a pass once to count them.

    Attributes:
        steps: Steps of a pass: those of the worker with the most batches. None where epochs have a number of
            steps of their own and nobody knows the length of a pass; then each worker goes through its own
            passes.
        expected: The same.

    Args:
        worker: This worker.
        reader: Its batches.
        what: How to call the data in complaints.
        trains: Whether it is trained on; who judges asks only for steps in which there are rows.
        bounded: Steps of an epoch, where they are not those of a pass.
    """

    def __init__(
        self, worker: Group, reader: Reader, *, what: str, trains: bool = True, bounded: int | None = None
    ) -> None:
        super().__init__(worker, reader, what=what, bounded=bounded is not None, number=1)
        lengths = self._agreed.lengths
        if lengths is None and bounded is None:
            lengths = self._counted()
        self._bounded = bounded
        self.steps = self.expected = None if lengths is None else max(lengths)
        self._own = None if lengths is None else lengths[worker.rank]
        uneven = self._own is None or reader.whole or self._own < (self.steps or 0)
        self._idles = trains and worker.size > 1 and uneven
        self._lock = threading.Lock()
        self._parts: Peeking | None = None
        self._number = self._place = self._given = 0
        self._next = -1
        self._last: tuple[int, Batch] | None = None
        self._rows: dict[int, int] = {}

    @property
    def may_idle(self) -> bool:
        return self._idles

    def sample(self) -> Batch:
        """A batch of no rows, that has the shapes of all."""
        return self._whole(None)

    def own_steps(self) -> Sequence[int]:
        """The steps of a pass in which this worker has a batch."""
        return range(self._own or 0)

    def batch(self, step: int) -> Batch:
        """One step. Asked for out of order, it is the first of a new pass; asked for again, the same."""
        with self._lock:
            if self._last is not None and self._last[0] == step:
                self._rows[step] = self._last[1].rows  # it may be of another round over a single step
                return self._last[1]
            if step != self._next:
                self._start((step // (self.steps or self._bounded or 1)) + 1)
            part = self._taken()
            if part is None and not self.may_idle:
                raise DataError(f"{self._what} gave a batch without rows.")
            batch = self._whole(part)
            self._next, self._last, self._rows[step] = step + 1, (step, batch), batch.rows
            return batch

    def rows_of(self, first: int, last: int) -> tuple[int, int]:
        """Rows of this worker in the steps [first, last), and about how many those of all are."""
        own = sum(self._rows.get(step, 0) for step in range(first, last))
        return own, own * self._worker.size

    def rows_of_all(self, first: int, last: int) -> int:
        """Rows of all workers in these steps, which are over; all call it together."""
        own, _ = self.rows_of(first, last)
        # A copy first: a thread that reads ahead may add to it.
        self._rows = {step: rows for step, rows in dict(self._rows).items() if step >= last}
        return self._worker.total([own])[0]

    def close(self) -> None:
        """End what is open."""
        if self._parts is not None:
            self._parts.close()
        super().close()

    def _start(self, number: int) -> None:
        if self._parts is not None:
            self._parts.close()
        self._parts, self._number, self._place, self._given = self._begin(number), number, 0, 0

    def _taken(self) -> Part | None:
        parts = self._parts
        if parts is None:
            return None
        if self.steps is None or self._own is None:
            return self._cycled(parts)
        if self._place == self.steps:
            self._start(self._number + 1)
            return self._taken()
        place, self._place = self._place, self._place + 1
        if place >= self._own:
            return None
        if parts.ended:
            raise DataError(f"{self._what} said that it has {self._own} batches and gave {place}.")
        part = next(parts)
        if place + 1 == self._own and not parts.ended:
            raise DataError(f"{self._what} said that it has {self._own} batches and gave more.")
        return part

    def _cycled(self, parts: Peeking) -> Part | None:
        """Without end: after a pass comes the next one. Who was given nothing in a pass has none."""
        if not parts.ended:
            self._given += 1
            return next(parts)
        if not self._given:
            return None
        self._start(self._number + 1)
        return self._taken()

    def _whole(self, part: Part | None) -> Batch:
        if part is None:
            return self._agreed.empty()
        self._refuse_other_shapes(part)
        return _batch(part, part.rows)

    def _refuse_other_shapes(self, part: Part) -> None:
        for name, array in zip(self._agreed.names, (*part.features, *part.labels), strict=True):
            dtype, shape = self._agreed.layout[name]
            if (array.dtype.name, list(array.shape[1:])) != (dtype, list(shape)):
                raise DataError(
                    f"has {array.dtype} rows of shape {array.shape[1:]} where the first batch has {dtype} of"
                    f" {tuple(shape)}; all must be alike.\nHint: pad rows to one length for all batches.",
                    column=name,
                )

    def _counted(self) -> tuple[int, ...]:
        """Every worker's batches of a pass, each counted by itself."""
        parts = self._begin(1)
        try:
            own = sum(1 for _ in parts)
        finally:
            parts.close()
        told = self._worker.all_gather(str(own).encode())
        return tuple(int(part) for part in told)


def _batch(part: Part | None, global_rows: int, *, ends: bool = False) -> Batch:
    if part is None:
        return Batch((), (), 0, global_rows, ends)
    return Batch(part.features, part.labels, part.rows, global_rows, ends)
