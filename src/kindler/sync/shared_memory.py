"""Sums of flat arrays between the processes of one host, through memory that all of them map.

A `Segment` is the mapping: a file in /dev/shm (or in the scratch folder where that is full), unlinked as
soon as every rank has mapped it, so that nothing is left behind whatever ends the processes. It is cut
into `Channel`s: one slot for each rank, and three counters of each rank that say how far it is. A rank
fills its own slot, says so, and adds up all slots in rank order, so that every rank ends with the same bits.

What an array is, numpy's or torch's, is left to the `Arrays` that is handed in. How the ranks of several
hosts agree is left to the groups (`allreduce_torch.py`, `allreduce_host.py`), which let one rank of each host
speak for it and bring the result back with `Channel.publish` and `Channel.fetch`.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from kindler.errors import SyncError, SyncTimeoutError
from kindler.sync.wait_clock import Waiting

_LINE_BYTES = 64  # one cache line: counters of two ranks never share one
ALIGN_BYTES = 4096
_SPIN_S = 0.00005  # looking without a pause before the core is left to others, the awaited rank among them
_NAP_S = 0.00002
_LONG_NAP_S = 0.001
_NAP_SHARE = 0.1  # a nap is at most this part of the wait so far: late by little, and looks stay few
_DIRECT_RANKS = 3  # up to here every rank adding up everything beats a second meeting

_MORE_ROOM = (
    "Hint: Docker gives a container 64 MB of /dev/shm; --shm-size, or a larger tmpfs there, gives more."
)
_log = logging.getLogger(__name__)

_ARRIVED, _SUMMED, _DONE = 0, 1, 2

_IN_ORDER = platform.machine().lower() in {"x86_64", "amd64", "i686"}
_fence_lock = threading.Lock()


def _room(folder: Path) -> str:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return ""
    return f" ({usage.free:,} of {usage.total:,} bytes are free)"


class Rendezvous(Protocol):
    """The part of a worker that mappings need: where to put files, and a way to tell the other ranks."""

    @property
    def scratch(self) -> Path: ...

    @property
    def run_id(self) -> str: ...

    def all_gather(self, data: bytes) -> list[bytes]: ...

    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]: ...


class Member(Rendezvous, Protocol):
    """The part of a worker that every group needs: who it is, and where all of them are."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def hosts(self) -> tuple[str, ...]: ...


class Arrays(Protocol):
    """What a channel does with the flat arrays of one library; `NUMPY` and `TORCH` are the two there are."""

    def view(self, mapping: mmap.mmap, offset: int, nbytes: int, dtype: Any) -> Any:
        """As many whole elements of `dtype` as these bytes of the mapping hold, without a copy."""

    def count(self, array: Any) -> int:
        """How many elements it has."""

    def add_up(self, parts: Sequence[Any], out: Any) -> None:
        """Write the sum of the parts, two at least, to `out`, adding in their order."""

    def copy(self, source: Any, out: Any) -> None:
        """Overwrite `out` with `source`."""

    def empty(self, count: int, like: Any) -> Any:
        """A fresh flat array of the dtype of `like`."""

    def raw(self, array: Any) -> memoryview:
        """The bytes of a flat array, without a copy; writing to them writes to it."""


class HostRanks:
    """Who shares this host: the global ranks in order, this one's place among them, and its patience."""

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        *,
        size: int,
        timeout_s: float,
        waiting: Waiting | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(rank)
        self.size = size
        self.timeout_s = timeout_s
        self.waiting = waiting or Waiting()

    @property
    def leader(self) -> int:
        """The global rank that speaks for this host."""
        return self.ranks[0]


class Segment:
    """A file mapped by several processes; `view` gives its bytes, `unlink` removes its name."""

    def __init__(self, path: str, *, nbytes: int, create: bool) -> None:
        self.path = path
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        handle = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(handle, 0, nbytes)  # a full disk is an error here, not a SIGBUS later
            self.mapping = mmap.mmap(handle, nbytes)
        except OSError:
            if create:
                os.unlink(path)
            raise
        finally:
            os.close(handle)

    @classmethod
    def create(cls, folders: Sequence[Path], name: str, nbytes: int) -> Segment:
        """Make the file in the first folder that has room for it; a warning says which had none.

        Raises:
            SyncError: None of them has.
        """
        problems: list[str] = []
        for folder in folders:
            try:
                made = cls(str(folder / f"{name}-{uuid.uuid4().hex[:12]}"), nbytes=nbytes, create=True)
            except OSError as exc:
                problems.append(f"{folder}: {exc.strerror or exc}{_room(folder)}")
                continue
            if problems:
                _log.warning(
                    "no room for %s bytes of shared memory in %s; a file in %s is used.\n%s",
                    f"{nbytes:,}",
                    "; ".join(problems),
                    folder,
                    _MORE_ROOM,
                )
            return made
        raise SyncError(
            f"no room for {nbytes:,} bytes of shared memory: {'; '.join(problems)}.\n{_MORE_ROOM}"
        )

    def unlink(self) -> None:
        """Remove the name; the memory lives on until the last process lets go of it."""
        Path(self.path).unlink(missing_ok=True)


class Channel:
    """One exchange at a time between the ranks of a host, repeated round after round.

    A round is: `slot` (filled by the caller), `post`, then `sum_into`, or `gather_into` and `publish` on the
    leader and `fetch` elsewhere. Every wait ends with SyncTimeoutError after the ranks' `timeout_s`.
    """

    def __init__(self, mapping: mmap.mmap, offset: int, nbytes: int, host: HostRanks, arrays: Arrays) -> None:
        self._host = host
        self._arrays = arrays
        self._mapping = mapping
        self._round = 0
        count = len(host.ranks)
        self._counters = memoryview(mapping)[offset : offset + count * _LINE_BYTES].cast("q")
        start, room = offset + _aligned(count * _LINE_BYTES), _aligned(nbytes)
        self.nbytes = nbytes
        self._offsets = [start + i * room for i in range(count)]
        self._typed: dict[Any, list[Any]] = {}

    @staticmethod
    def footprint(nbytes: int, ranks: int) -> int:
        """Bytes of mapping that a channel for `nbytes` takes."""
        return _aligned(ranks * _LINE_BYTES) + ranks * _aligned(nbytes)

    @property
    def place(self) -> int:
        """This rank's place among those of its host."""
        return self._host.index

    def slot(self, dtype: Any) -> Any:
        """This rank's slot, once nobody reads its last content any more."""
        self._await(_DONE, self._round, "shared-memory exchange (last round)")
        return self._slots_as(dtype)[self._host.index]

    def peek(self, dtype: Any) -> Any:
        """This rank's slot, for making views of it: only `slot` says when it may be written."""
        return self._slots_as(dtype)[self._host.index]

    def post(self) -> None:
        """Say that this rank's slot is filled."""
        self._round += 1
        self._tell(_ARRIVED)

    def arrived(self) -> bool:
        """Whether every rank has posted this round; does not wait."""
        return self._behind(_ARRIVED, self._round) == []

    def sum_into(self, out: Any) -> None:
        """Write the sum of all slots to `out`, the same bits on every rank."""
        if len(self._host.ranks) <= _DIRECT_RANKS:
            self.gather_into(out)
        else:
            self._sum_in_parts(out)
        self._tell(_DONE)

    def sum_parts(self, out: Any, parts: Sequence[slice]) -> None:
        """Write the sum of these parts of all slots to the same parts of `out`, and end the round."""
        self._await(_ARRIVED, self._round, "shared-memory exchange")
        slots = self._slots_as(out.dtype)
        for part in parts:
            self._arrays.add_up([slot[part] for slot in slots], out[part])
        self._tell(_DONE)

    def await_all(self) -> None:
        """Wait until all ranks have posted: their slots may be read until `skip` ends the round."""
        self._await(_ARRIVED, self._round, "shared-memory exchange (slices)")

    def slots(self, dtype: Any) -> list[Any]:
        """All ranks' slots, for making views of them: only `await_all` says when they may be read."""
        return self._slots_as(dtype)

    def board(self, dtype: Any) -> Any:
        """All slots as one array, which they are where a slot's size is a multiple of `ALIGN_BYTES`."""
        assert self.nbytes % ALIGN_BYTES == 0, "there would be gaps"
        return self._arrays.view(self._mapping, self._offsets[0], self.nbytes * len(self._offsets), dtype)

    def gather_into(self, out: Any) -> None:
        """Wait for all ranks and add up their slots in rank order; the round stays open."""
        self._await(_ARRIVED, self._round, "shared-memory exchange")
        count = self._arrays.count(out)
        self._arrays.add_up([slot[:count] for slot in self._slots_as(out.dtype)], out)

    def publish(self, result: Any) -> None:
        """Give the other ranks of this host the result (the leader only), and end the round."""
        slot = self._slots_as(result.dtype)[self._host.index]
        self._arrays.copy(result, slot[: self._arrays.count(result)])
        self._tell(_SUMMED)
        self._tell(_DONE)

    def publish_parts(self, result: Any, parts: Sequence[slice]) -> None:
        """Give the other ranks of this host these parts of the result (the leader only); ends the round."""
        slot = self._slots_as(result.dtype)[self._host.index]
        for part in parts:
            self._arrays.copy(result[part], slot[part])
        self._tell(_SUMMED)
        self._tell(_DONE)

    def fetch_parts(self, out: Any, parts: Sequence[slice]) -> None:
        """Take these parts of what the leader published, and end the round."""
        self._await(_SUMMED, self._round, "shared-memory exchange (result)", only=0)
        slot = self._slots_as(out.dtype)[0]
        for part in parts:
            self._arrays.copy(slot[part], out[part])
        self._tell(_DONE)

    def fetch(self, out: Any, *, source: int = 0) -> None:
        """Take what the rank in place `source` published, and end the round."""
        self._await(_SUMMED, self._round, "shared-memory exchange (result)", only=source)
        self._arrays.copy(self._slots_as(out.dtype)[source][: self._arrays.count(out)], out)
        self._tell(_DONE)

    def skip(self) -> None:
        """End the round without reading anything."""
        self._tell(_DONE)

    def _sum_in_parts(self, out: Any) -> None:
        """Each rank adds up its part into the first slot; then all copy the whole of that."""
        self._await(_ARRIVED, self._round, "shared-memory exchange")
        count, ranks, index = self._arrays.count(out), len(self._host.ranks), self._host.index
        part = slice(index * count // ranks, (index + 1) * count // ranks)
        slots = self._slots_as(out.dtype)
        self._arrays.add_up([slot[part] for slot in slots], slots[0][part])
        self._tell(_SUMMED)
        self._await(_SUMMED, self._round, "shared-memory exchange (parts)")
        self._arrays.copy(slots[0][:count], out)

    def _slots_as(self, dtype: Any) -> list[Any]:
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = [
                self._arrays.view(self._mapping, offset, self.nbytes, dtype) for offset in self._offsets
            ]
        return typed

    def _tell(self, counter: int) -> None:
        _fence()
        self._counters[self._host.index * (_LINE_BYTES // 8) + counter] = self._round

    def _behind(self, counter: int, wanted: int, only: int | None = None) -> list[int]:
        """Places of the ranks whose counter has not reached `wanted`."""
        places = range(len(self._host.ranks)) if only is None else (only,)
        counters, stride = self._counters, _LINE_BYTES // 8
        return [place for place in places if counters[place * stride + counter] < wanted]

    def _await(self, counter: int, wanted: int, op: str, only: int | None = None) -> None:
        if self._behind(counter, wanted, only):
            with self._host.waiting:
                _wait_until(lambda: not self._behind(counter, wanted, only), self._host.timeout_s)
        late = self._behind(counter, wanted, only)
        if late:
            missing = [self._host.ranks[place] for place in late]
            raise SyncTimeoutError(
                op=op, missing=missing, size=self._host.size, waited_s=self._host.timeout_s
            )
        _fence()


def channels(worker: Rendezvous, host: HostRanks, sizes: Sequence[int], arrays: Arrays) -> list[Channel]:
    """Channels of these sizes in bytes between the ranks of this host; every rank of the run calls it.

    A rank that is alone on its host gets none.

    Raises:
        SyncError: The ranks of this host do not see each other's memory, or there is no room for it.
    """
    count = len(host.ranks)
    footprints = [Channel.footprint(size, count) for size in sizes]
    nbytes = max(sum(footprints), mmap.PAGESIZE)
    leads = host.ranks[host.index] == host.leader and count > 1
    segment, problem = _attempt(lambda: _create(worker, nbytes)) if leads else (None, "")
    told = worker.gather(segment.path.encode() if segment else b"", [host.leader])
    path = told[host.leader].decode()
    if count > 1 and segment is None and path:
        segment, problem = _attempt(lambda: Segment(path, nbytes=nbytes, create=False))
    # The second meeting: all have mapped it (or failed to), so its name can go.
    complaints = [data.decode() for data in worker.all_gather(problem.encode())]
    if segment is not None and leads:
        segment.unlink()
    _raise_first(complaints)
    if segment is None:
        return []
    offsets = [sum(footprints[:i]) for i in range(len(sizes))]
    return [
        Channel(segment.mapping, offset, size, host, arrays)
        for offset, size in zip(offsets, sizes, strict=True)
    ]


def _create(worker: Rendezvous, nbytes: int) -> Segment:
    folders = [Path("/dev/shm"), Path(worker.scratch)]
    return Segment.create(folders, f"kindler-{worker.run_id}", nbytes)


def _attempt(make: Callable[[], Segment]) -> tuple[Segment | None, str]:
    """What `make` gives, or a complaint for all ranks: one that raised alone would leave them waiting."""
    try:
        return make(), ""
    except (OSError, ValueError, SyncError) as exc:
        return None, str(exc) or repr(exc)


def _raise_first(complaints: Sequence[str]) -> None:
    for rank, complaint in enumerate(complaints):
        if complaint:
            raise SyncError(
                f"worker {rank} cannot share memory with the others of its host: {complaint}\n"
                "Hint: containers of one host need a common /dev/shm; shared_memory=False goes without."
            )


def _wait_until(ready: Callable[[], bool], timeout_s: float) -> None:
    """Look without a pause, then nap between looks; returns when it is so or the time is over."""
    start = time.monotonic()
    while not ready():
        waited = time.monotonic() - start
        if waited > timeout_s:
            return
        if waited > _SPIN_S:
            time.sleep(min(max(_NAP_S, waited * _NAP_SHARE), _LONG_NAP_S))


def _fence() -> None:
    """Keep slot and counter accesses in order between processes, also on processors that reorder stores.

    x86 does not. Elsewhere a lock taken twice is a full barrier: a release followed by an acquire.
    """
    if _IN_ORDER:
        return
    with _fence_lock:
        pass
    with _fence_lock:
        pass


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
