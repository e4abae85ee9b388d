"""Sums of flat arrays between the processes of one host, through memory that all of them map.

A `Segment` is a file in /dev/shm (or in the scratch folder if that is full), unlinked as soon as every rank
has mapped it, so that nothing is left behind however the processes end. It is cut into `Channel`s: one slot
per rank, and three progress counters per rank. All ranks add up the slots in rank order and so get the same
bits. Between hosts, one rank per host speaks for it and brings the result back with `publish` and `fetch`.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import platform
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kindler import limits
from kindler.errors import SyncError, SyncTimeoutError
from kindler.group import Group

_LINE_BYTES = 64  # one cache line: counters of two ranks never share one
_PAGE_BYTES = 4096
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


class Arrays(Protocol):
    """Operations on the flat arrays of one library, here and in `ring.py`."""

    def view(self, mapping: mmap.mmap, offset: int, nbytes: int, dtype: Any) -> Any:
        """As many whole elements of `dtype` as these bytes of the mapping hold, without a copy."""

    def count(self, array: Any) -> int: ...

    def add_up(self, parts: Sequence[Any], out: Any) -> None:
        """Write the sum of the parts, at least two, to `out`, adding in their order."""

    def copy(self, source: Any, out: Any) -> None: ...

    def empty(self, count: int, like: Any) -> Any: ...

    def raw(self, array: Any) -> memoryview:
        """The bytes of a flat array, without a copy; writable."""


class _NumpyArrays:
    def view(self, mapping: mmap.mmap, offset: int, nbytes: int, dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        return np.frombuffer(mapping, dtype, nbytes // dtype.itemsize, offset)

    def count(self, array: Any) -> int:
        return int(array.size)

    def add_up(self, parts: Sequence[Any], out: Any) -> None:
        np.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            np.add(out, part, out=out)

    def copy(self, source: Any, out: Any) -> None:
        np.copyto(out, source)

    def empty(self, count: int, like: Any) -> Any:
        return np.empty(count, like.dtype)

    def raw(self, array: Any) -> memoryview:
        return memoryview(array.view(np.uint8).data)


NUMPY = _NumpyArrays()


class Waiting:
    """`with waiting:` around what blocks until other ranks come; counts the `seconds`.

    Sets the worker's `waiting`, which tells a rank held up by others from a busy one.
    """

    def __init__(self, worker: Group | None = None) -> None:
        self.seconds = 0.0
        self._worker = worker
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.monotonic()
        if self._worker is not None:
            self._worker.waiting = True

    def __exit__(self, *exc: object) -> None:
        self.seconds += time.monotonic() - self._since
        if self._worker is not None:
            self._worker.waiting = False

    @property
    def absent(self) -> frozenset[int]:
        """Ranks that have died, and will not come."""
        return frozenset() if self._worker is None else self._worker.absent


class Topology:
    """One rank's view of who is where, decided from the hosts' names alone.

    `ranks` share memory with this one, which is at `index` among them; `leaders` are the first ranks of each
    host, and `leader_of` has the place of each rank's leader there.

    >>> view = Topology(["a", "b", "a"], rank=2)
    >>> view.ranks, view.leaders, view.leader_of, view.leads
    ((0, 2), (0, 1), (0, 1, 0), False)
    """

    def __init__(
        self, hosts: Sequence[str], rank: int, *, timeout_s: float = 60.0, waiting: Waiting | None = None
    ) -> None:
        self.rank, self.size = rank, len(hosts)
        self.timeout_s = timeout_s
        self.waiting = waiting or Waiting()
        self.ranks = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
        self.index = self.ranks.index(rank)
        self.leaders = tuple(other for other, host in enumerate(hosts) if hosts.index(host) == other)
        self.leader_of = tuple(self.leaders.index(hosts.index(host)) for host in hosts)
        self.leads = self.index == 0
        self.one_host = len(self.leaders) == 1
        self.any_shared = len(self.leaders) < self.size  # then all ranks meet to set it up

    @classmethod
    def of(cls, worker: Group, *, timeout_s: float, waiting: Waiting, shared_memory: bool) -> Topology:
        hosts = worker.hosts if shared_memory else [str(rank) for rank in range(worker.size)]
        return cls(hosts, worker.rank, timeout_s=timeout_s, waiting=waiting)


class Segment:
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
        """Create the file in the first folder that has room; warn about those that had none."""
        problems: list[str] = []
        for folder in folders:
            try:
                made = cls(str(folder / f"{name}-{uuid.uuid4().hex[:12]}"), nbytes=nbytes, create=True)
            except OSError as exc:
                problems.append(f"{folder}: {exc.strerror or exc}{_room(folder)}")
                continue
            if problems:
                _log.warning(
                    "no space for %s bytes of shared memory in %s; using a file in %s.\n%s",
                    f"{nbytes:,}",
                    "; ".join(problems),
                    folder,
                    _MORE_ROOM,
                )
            return made
        raise SyncError(
            f"no space for {nbytes:,} bytes of shared memory: {'; '.join(problems)}.\n{_MORE_ROOM}"
        )

    def unlink(self) -> None:
        """Remove the name; the memory lives until the last process lets go of it."""
        Path(self.path).unlink(missing_ok=True)


class Channel:
    """One exchange at a time between the ranks of a host, repeated round after round.

    A round is: `slot` (filled by the caller), `post`, then `sum_into`; or `gather_into` and `publish` on the
    leader and `fetch` elsewhere; or `await_all`, reading `slots`, and `skip`. With `parts`, only those
    elements count. Every wait ends with SyncTimeoutError after `timeout_s`.
    """

    def __init__(self, mapping: mmap.mmap, offset: int, nbytes: int, host: Topology, arrays: Arrays) -> None:
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
        return _aligned(ranks * _LINE_BYTES) + ranks * _aligned(nbytes)

    def slot(self, dtype: Any) -> Any:
        """This rank's slot, once no other rank reads its last content."""
        self._await(_DONE, self._round, "shared-memory exchange (last round)")
        return self.slots(dtype)[self._host.index]

    def slots(self, dtype: Any) -> list[Any]:
        """All ranks' slots: write after `slot`, read after `await_all`."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = [
                self._arrays.view(self._mapping, offset, self.nbytes, dtype) for offset in self._offsets
            ]
        return typed

    def post(self) -> None:
        self._round += 1
        self._set(_ARRIVED)

    def arrived(self) -> bool:
        return self._behind(_ARRIVED, self._round) == []

    def await_all(self) -> None:
        """Wait until all ranks have posted; their slots may be read until `skip` ends the round."""
        self._await(_ARRIVED, self._round, "shared-memory exchange")

    def skip(self) -> None:
        self._set(_DONE)

    def sum_into(self, out: Any, parts: Sequence[slice] | None = None) -> None:
        """Write the sum of all slots to `out`, bit-identical on every rank."""
        if parts is not None:
            self.await_all()
            slots = self.slots(out.dtype)
            for part in parts:
                self._arrays.add_up([slot[part] for slot in slots], out[part])
        elif len(self._host.ranks) <= _DIRECT_RANKS:
            self.gather_into(out)
        else:
            self._sum_by_shares(out)
        self._set(_DONE)

    def gather_into(self, out: Any) -> None:
        """Wait for all ranks and add up their slots in rank order; the round stays open."""
        self.await_all()
        count = self._arrays.count(out)
        self._arrays.add_up([slot[:count] for slot in self.slots(out.dtype)], out)

    def publish(self, result: Any, parts: Sequence[slice] | None = None) -> None:
        """Give the other ranks of this host the result (leader only), and end the round."""
        slot = self.slots(result.dtype)[self._host.index]
        for part in [slice(self._arrays.count(result))] if parts is None else parts:
            self._arrays.copy(result[part], slot[part])
        self._set(_SUMMED)
        self._set(_DONE)

    def fetch(self, out: Any, parts: Sequence[slice] | None = None, *, source: int = 0) -> None:
        """Take what the rank in place `source` published, and end the round."""
        self._await(_SUMMED, self._round, "shared-memory exchange (result)", only=source)
        slot = self.slots(out.dtype)[source]
        for part in [slice(self._arrays.count(out))] if parts is None else parts:
            self._arrays.copy(slot[part], out[part])
        self._set(_DONE)

    def _sum_by_shares(self, out: Any) -> None:
        self.await_all()
        count, ranks, index = self._arrays.count(out), len(self._host.ranks), self._host.index
        share = slice(index * count // ranks, (index + 1) * count // ranks)
        slots = self.slots(out.dtype)
        self._arrays.add_up([slot[share] for slot in slots], slots[0][share])
        self._set(_SUMMED)
        self._await(_SUMMED, self._round, "shared-memory exchange (parts)")
        self._arrays.copy(slots[0][:count], out)

    def _set(self, counter: int) -> None:
        _fence()
        self._counters[self._host.index * (_LINE_BYTES // 8) + counter] = self._round

    def _behind(self, counter: int, wanted: int, only: int | None = None) -> list[int]:
        places = range(len(self._host.ranks)) if only is None else (only,)
        counters, stride = self._counters, _LINE_BYTES // 8
        return [place for place in places if counters[place * stride + counter] < wanted]

    def _patience_s(self, counter: int, wanted: int, only: int | None) -> float:
        absent = self._host.waiting.absent
        if not absent:
            return math.inf
        late = {self._host.ranks[place] for place in self._behind(counter, wanted, only)}
        # The others may be on their way: what all can still finish need not be done again.
        return 0.0 if late & absent else limits.STRAGGLERS_S

    def _await(self, counter: int, wanted: int, op: str, only: int | None = None) -> None:
        if self._behind(counter, wanted, only):
            with self._host.waiting:
                _wait_until(
                    lambda: not self._behind(counter, wanted, only),
                    self._host.timeout_s,
                    lambda: self._patience_s(counter, wanted, only),
                )
        if late := self._behind(counter, wanted, only):
            missing = [self._host.ranks[place] for place in late]
            if absent := sorted(self._host.waiting.absent):
                raise SyncError(f"{op}: workers {absent} died before they took part.")
            raise SyncTimeoutError(
                op=op, missing=missing, size=self._host.size, waited_s=self._host.timeout_s
            )
        _fence()


def channels(worker: Group, host: Topology, sizes: Sequence[int], arrays: Arrays) -> list[Channel]:
    """Channels of these byte sizes between the ranks of this host; every rank of the run calls it.

    Empty for a rank alone on its host. Raises SyncError if ranks cannot see each other's memory.
    """
    segment, offsets = _mapped(worker, host, [Channel.footprint(size, len(host.ranks)) for size in sizes])
    if segment is None:
        return []
    return [
        Channel(segment.mapping, offset, size, host, arrays)
        for offset, size in zip(offsets, sizes, strict=True)
    ]


def shared_array(
    worker: Group, host: Topology, nbytes: int, dtype: Any, arrays: Arrays
) -> tuple[Any, Channel]:
    """Memory shared by all ranks of a one-host run, and a channel to meet; all ranks call it."""
    segment, offsets = _mapped(worker, host, [Channel.footprint(0, host.size), _aligned(nbytes)])
    assert segment is not None, "the ranks of one host share memory"
    meeting = Channel(segment.mapping, offsets[0], 0, host, arrays)
    return arrays.view(segment.mapping, offsets[1], nbytes, dtype), meeting


def _mapped(worker: Group, host: Topology, sizes: Sequence[int]) -> tuple[Segment | None, list[int]]:
    """A segment for these sizes, and where each begins; None for a rank alone on its host."""
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    nbytes = max(sum(sizes), mmap.PAGESIZE)
    leader, several = host.ranks[0], len(host.ranks) > 1
    segment, problem = _attempt(lambda: _create(worker, nbytes)) if host.leads and several else (None, "")
    path = worker.gather(segment.path.encode() if segment else b"", [leader])[leader].decode()
    if several and segment is None and path:
        segment, problem = _attempt(lambda: Segment(path, nbytes=nbytes, create=False))
    # The second meeting: all have mapped it (or failed to), so its name can go.
    complaints = [data.decode() for data in worker.all_gather(problem.encode())]
    if segment is not None and host.leads:
        segment.unlink()
    for rank, complaint in enumerate(complaints):
        if complaint:
            raise SyncError(
                f"worker {rank} cannot share memory with the others of its host: {complaint}\n"
                "Hint: containers of one host need a common /dev/shm; shared_memory=False goes without."
            )
    return segment, offsets


def _create(worker: Group, nbytes: int) -> Segment:
    folders = [Path("/dev/shm"), Path(worker.scratch)]
    return Segment.create(folders, f"kindler-{worker.run_id}", nbytes)


def _attempt(make: Callable[[], Segment]) -> tuple[Segment | None, str]:
    """Turn an error into a complaint for all ranks: one that raised alone would leave them waiting."""
    try:
        return make(), ""
    except (OSError, ValueError, SyncError) as exc:
        return None, str(exc) or repr(exc)


def _room(folder: Path) -> str:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return ""
    return f" ({usage.free:,} of {usage.total:,} bytes are free)"


def _wait_until(ready: Callable[[], bool], timeout_s: float, patience_s: Callable[[], float]) -> None:
    """Spin, then nap between looks; also returns when the time is over, or `patience_s` from now."""
    start = time.monotonic()
    while not ready():
        waited = time.monotonic() - start
        if waited > timeout_s:
            return
        if waited > _SPIN_S:
            time.sleep(min(max(_NAP_S, waited * _NAP_SHARE), _LONG_NAP_S))
            timeout_s = min(timeout_s, waited + patience_s())


def _fence() -> None:
    """Keep slot and counter accesses in order between processes, even on CPUs that reorder stores.

    x86 does not. Elsewhere, taking a lock twice is a full barrier: a release followed by an acquire.
    """
    if _IN_ORDER:
        return
    with _fence_lock:
        pass
    with _fence_lock:
        pass


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
