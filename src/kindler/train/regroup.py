"""Going on without a restart when the process of a rank dies and another one takes its place.

All ranks but the new one have the run's state as of the last whole step. What a rank has for itself within an
epoch (randomness, counts, buffers) it writes to a file in each step, before the others can complete the step.
Ranks of its machine hold the file open, give it to the new process, and use their own to undo half a step.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kindler import limits
from kindler.collective import Collective, share_bytes
from kindler.data.batches import Rows
from kindler.errors import SyncError, SyncTimeoutError
from kindler.group import Group
from kindler.sync.contract import Sync
from kindler.train.loop import Loop, Place, Point, Start
from kindler.train.options import Task

_MOST_BYTES = 1 << 20  # of a rank's own state: more would slow each step down
_HEAD = struct.Struct("<5q")  # epoch, step in the epoch, step, rows, bytes; -1 if they were too many

Own = tuple[bytes, int]  # a replica's snapshot, and the rows that it has trained on in the epoch


class OwnStates:
    """A rank's own state after its last two steps, readable by ranks of its machine after its death."""

    def __init__(self, worker: Group) -> None:
        self._worker = worker
        # A process finds that of the one whose place it takes, where it has its folder.
        self._path = str(worker.scratch / f"own-{worker.rank}")
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.memory = os.memfd_create("kindler-own")  # what the replica keeps
        # Of the other ranks of this machine.
        self._files: dict[int, int] = {}
        self._memories: dict[int, int] = {}
        self._too_large = -1  # the epoch in which they were

    def write(
        self, place: Place, snapshot: Callable[[], bytes | None], rows: int, *, ahead: bool = False
    ) -> None:
        """`ahead`: before the step is made; what is written after it comes first in `read`."""
        start, nbytes = _start_of(place, ahead=ahead), -1
        if self._too_large != place.epoch:
            data = snapshot()
            if data is not None and len(data) <= _MOST_BYTES:
                nbytes = os.pwrite(self._file, data, start + _HEAD.size)
            elif data is not None:
                self._too_large = place.epoch  # and it grows: it is not taken again before the next epoch
        # At last: what was there before is of the step before the last, which nobody goes back to.
        os.pwrite(self._file, _HEAD.pack(*place, rows, nbytes), start)

    def read(self, rank: int, place: Place) -> Own | None:
        """None if that rank has not written it, or where this one cannot see it."""
        file = self._file if rank == self._worker.rank else self._files.get(rank)
        if file is None:
            return None
        for start in (_start_of(place, ahead=False), _start_of(place, ahead=True)):
            head = os.pread(file, _HEAD.size, start)
            if len(head) < _HEAD.size:
                continue
            *written, rows, nbytes = _HEAD.unpack(head)
            if tuple(written) == place:
                return None if nbytes < 0 else (os.pread(file, nbytes, start + _HEAD.size), rows)
        return None

    def memory_of(self, rank: int) -> int | None:
        return self._memories.get(rank)

    def share(self) -> None:
        """Open those of the other ranks of this machine; all ranks call it."""
        worker = self._worker
        paths = worker.all_gather(json.dumps([self._path, path_of(self.memory)]).encode())
        for rank in range(worker.size):
            if worker.hosts[rank] == worker.host and rank != worker.rank:
                self._drop(rank)
                for files, path in zip((self._files, self._memories), json.loads(paths[rank]), strict=True):
                    with suppress(OSError):  # containers may have the name of a host in common, and no folder
                        files[rank] = os.open(path, os.O_RDONLY)

    def close(self) -> None:
        for rank in {*self._files, *self._memories}:
            self._drop(rank)
        os.close(self._file)
        os.close(self.memory)

    def _drop(self, rank: int) -> None:
        for files in (self._files, self._memories):
            if (file := files.pop(rank, None)) is not None:
                os.close(file)


def path_of(file: int) -> str:
    """Where other processes of this machine open it, while this one lives."""
    return f"/proc/{os.getpid()}/fd/{file}"


def _start_of(place: Place, *, ahead: bool) -> int:
    return (place.step % 2 * 2 + ahead) * 2 * _MOST_BYTES


class Regrouper:
    """One rank's part in going on after losses; all ranks create it when their data is open.

    `took_over` is whether this process has taken the place of another one: it then calls `begin` and not
    `Sync.attach`.
    """

    def __init__(self, worker: Group, task: Task, replica: Any, sync: Sync, data: Rows) -> None:
        self._worker, self._replica, self._sync = worker, replica, sync
        self._own: OwnStates | None = None
        self.took_over = False
        if not worker.regroups or worker.size == 1:
            return
        can = (
            sync.regroups
            and replica.regroups
            and len(data.counts) > 0  # otherwise the same rows may not come again
            and task.config.settings.nan_loss != "skip"  # which undoes part of a step after its exchange
        )
        if worker.total([int(can)]) == [worker.size]:
            self._own = OwnStates(worker)
            replica.keep_in(self._own.memory)
            self.took_over = bool(worker.opened())
        else:
            worker.forgo_regroup()

    def begin(self, start: Start) -> Start:
        """Attach to the other ranks, and return where to start from."""
        if not self.took_over:
            self._sync.attach(self._replica, self._worker)
            if self._own is not None:
                self._own.share()
            return start
        while True:
            try:
                return self._meet(None)
            except SyncError as error:
                self._await_others(error)

    def run(self, loop: Loop) -> bytes | None:
        """Run a loop to its end, through losses, or until it moves; see `Loop.run_until_moved`."""
        own = self._own
        if own is not None:
            take = self._replica.snapshot
            loop.note = lambda place, rows, ahead: own.write(place, take, rows, ahead=ahead)
        while True:
            try:
                return loop.run_until_moved()
            except SyncError as error:
                if own is None or not loop.resumable or not self._knows(loop.place):
                    raise
                loop.stopwatch.lap("steps")
                self._await_others(error)
            loop.go_back(self._met_again(loop))

    def close(self) -> None:
        if self._own is not None:
            self._own.close()

    def _knows(self, place: Place) -> bool:
        return self._own is not None and self._own.read(self._worker.rank, place) is not None

    def _met_again(self, loop: Loop) -> Start:
        while True:
            try:
                return self._meet(loop)
            except SyncError as error:  # another one was lost
                self._await_others(error)

    def _await_others(self, error: SyncError) -> None:
        # A connection breaks before the news of why; whoever has waited in vain would have heard.
        if not self._worker.regroup(0.0 if isinstance(error, SyncTimeoutError) else limits.LOSS_S):
            raise error

    def _meet(self, loop: Loop | None) -> Start:
        """All ranks together: agree on a place, and let those that are not there yet have its state."""
        worker, own = self._worker, self._own
        assert own is not None, "it goes on after losses"
        places = [pickle.loads(part) for part in worker.all_gather(pickle.dumps(loop and tuple(loop.place)))]
        holders = [rank for rank, place in enumerate(places) if place is not None]
        if not holders:
            raise SyncError("all workers that had the state of the run have died.")
        holder = max(holders, key=lambda rank: (places[rank][2], -rank))
        place = Place(*places[holder])
        new = [rank for rank, known in enumerate(places) if known is None]
        can = loop is None or self._replica.go_back(place.step)
        fields: dict[str, Any] = {}
        state = b""
        if worker.rank == holder:
            assert loop is not None, "it has a place"
            fields, state = loop.point()
        fields = pickle.loads(worker.gather(pickle.dumps(fields), [holder])[holder])
        mine = self._record(place, new, can=can, within=fields["row"] is None)
        behind = places[worker.rank] != tuple(place)
        received = b""

        def join(collective: Collective) -> None:
            nonlocal received
            received = share_bytes(collective, state, holder)
            self._replica.rejoin(collective, received if behind else b"")

        self._sync.attach_again(self._replica, worker, join)
        if mine is not None and loop is None:
            snapshot, rows = mine
            own.write(place, lambda: snapshot, rows)
        own.share()
        if worker.rank == holder:  # all ranks are here
            worker.resumed()
        header, takes_over = fields["header"], loop is None
        point = Point(
            snapshot=mine,
            over=fields["over"],
            row=fields["row"],
            state=received if takes_over else b"",
            buffers=fields["buffers"] if takes_over else {},
            saved=fields["saved"],
        )
        if loop is None:
            return Start(**vars(header), point=point)
        return replace(
            loop.start,
            epoch=place.epoch,
            step=place.step,
            step_in_epoch=place.done,
            seconds=header.seconds,
            point=point,
        )

    def _record(self, place: Place, new: Sequence[int], *, can: bool, within: bool) -> Own | None:
        """What this rank alone knows of the epoch; raises SyncError on all ranks if any cannot go on.

        Args:
            place: Where all go on.
            new: The ranks whose process is new.
            can: Whether this rank has undone what it had done since.
            within: Whether the epoch's steps are still to be made, or its buffers to be merged.
        """
        own, replica, rank = self._own, self._replica, self._worker.rank
        assert own is not None, "it goes on after losses"
        found = {each: part for each in (*new, rank) if within and (part := own.read(each, place))}
        kept: dict[int, str] = {}  # where new processes find what those before them had
        if rank not in new:
            memories = {each: own.memory_of(each) for each in new}
            kept = {
                each: "" if file is None else path_of(file)
                for each, file in memories.items()
                if replica.is_kept(file, place.step)
            }
        lacks = rank not in new and (not can or (within and rank not in found))
        of_new = {each: part for each, part in found.items() if each in new}
        missing = []
        for each, data in enumerate(self._worker.all_gather(pickle.dumps((lacks, of_new, kept)))):
            lacks, others, elsewhere = pickle.loads(data)
            missing += [each] if lacks else []
            found |= others
            hosts = self._worker.hosts  # on another machine a path is that of something else
            kept |= {one: path for one, path in elsewhere.items() if not path or hosts[one] == hosts[each]}
        missing += [each for each in new if each not in kept]
        # At the beginning of an epoch the state of a new process follows from the seed.
        missing += [each for each in new if within and each not in found and place.done]
        if missing:
            raise SyncError(
                f"workers {sorted({*missing})} have no record of what only they know: it was too large, is"
                " gone with their machine, or they died before they wrote it.\n"
                "Hint: fit(checkpoint=...) writes checkpoints, from which the run restarts."
            )
        if rank in new:
            replica.keep_in(own.memory, kept[rank])
        return found.get(rank)
