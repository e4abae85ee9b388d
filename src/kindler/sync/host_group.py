"""Means, sums and broadcasts of numpy arrays over all workers of a run, without any framework.

In a `HostGroup`, ranks of one host meet in shared memory and the first of them speaks for the host in a ring
of TCP connections; arrays travel in windows of fixed size, so shared memory does not grow with the model. A
`GatherCollective` goes through the workers' meeting point, for few and small exchanges.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kindler.collective import Array
from kindler.errors import ConfigError, SyncError
from kindler.group import Group
from kindler.sync.ring import Ring
from kindler.sync.shared_memory import NUMPY, Channel, Topology, Waiting, channels

DType: TypeAlias = np.dtype[Any]

ALIGN_BYTES = 64  # so that frameworks can take the results without a copy
_WINDOW_BYTES = 2 << 20
_PART_BYTES = 64 << 10  # of a window, for each host of the ring: with less, the hops cost more than the bytes
_MOST_WINDOW_BYTES = 32 << 20
_WINDOWS = 2  # a rank fills one while others still read the one before
_AHEAD = 1
_MOST_PLANS = 256  # layouts that change from call to call are not kept for ever
_FLOAT32 = np.dtype(np.float32)
_BYTE = np.dtype(np.uint8)
_WEIGHT = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Piece:
    array: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Window:
    section: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How the arrays of one layout travel.

    Arrays of one carrier dtype lie one after the other in a section, a flat buffer of (dtype, elements),
    which is cut into windows that fit one slot of shared memory. `places` has each array's section and slice.
    """

    sections: tuple[tuple[DType, int], ...]
    windows: tuple[Window, ...]
    places: tuple[tuple[int, slice], ...]


def plan(
    layout: Sequence[tuple[int, DType]],
    carrier: Callable[[DType], DType],
    *,
    window_bytes: int,
    lead_bytes: int = 0,
) -> Plan:
    """Lay out arrays of these (elements, dtype), each section after `lead_bytes` for the weight."""
    carriers = [carrier(dtype) for _, dtype in layout]
    sections: list[tuple[DType, int]] = []
    windows: list[Window] = []
    places: dict[int, tuple[int, slice]] = {}
    for number, dtype in enumerate(dict.fromkeys(carriers)):
        step = max(ALIGN_BYTES // dtype.itemsize, 1)
        end = lead_bytes // dtype.itemsize
        members = [index for index, own in enumerate(carriers) if own == dtype]
        for index in members:
            start = -(-end // step) * step
            end = start + layout[index][0]
            places[index] = number, slice(start, end)
        sections.append((dtype, end))
        windows += _cut(number, end, window_bytes // dtype.itemsize, {i: places[i][1] for i in members})
    return Plan(tuple(sections), tuple(windows), tuple(places[index] for index in range(len(layout))))


def _cut(section: int, count: int, step: int, places: dict[int, slice]) -> list[Window]:
    pieces: list[list[Piece]] = [[] for _ in range(0, count, step)]
    for index, place in places.items():
        start = place.start
        while start < place.stop:
            number = start // step
            stop = min(place.stop, (number + 1) * step)
            pieces[number].append(
                Piece(index, start - place.start, stop - place.start, start - number * step)
            )
            start = stop
    return [
        Window(section, number * step, min((number + 1) * step, count), tuple(inside))
        for number, inside in enumerate(pieces)
    ]


class HostGroup:
    """One rank's end of a `Collective` over all workers of a run.

    One thread at a time. After a SyncTimeoutError or SyncError the group is unusable. `shared_memory=False`
    makes every rank count as a host of its own.
    """

    def __init__(self, worker: Group, *, timeout_s: float, shared_memory: bool = True) -> None:
        self.rank, self.size = worker.rank, worker.size
        self._worker = worker
        self._waiting = Waiting(worker)
        self._plans: dict[tuple[str, tuple[Any, ...]], Plan] = {}
        self._channels: list[Channel] = []
        self._turn = 0
        self._closed = False
        self._ring: Ring | None = None
        if self.size == 1:
            return
        self._where = Topology.of(
            worker, timeout_s=timeout_s, waiting=self._waiting, shared_memory=shared_memory
        )
        wanted = _PART_BYTES * len(self._where.leaders)
        self._window_bytes = min(max(_WINDOW_BYTES, wanted), _MOST_WINDOW_BYTES)
        if not self._where.one_host:
            self._ring = Ring.join(worker, self._where)
        if self._where.any_shared:
            try:
                self._channels = channels(worker, self._where, [self._window_bytes] * _WINDOWS, NUMPY)
            except BaseException:
                self.close()
                raise

    @property
    def waited_s(self) -> float:
        return self._waiting.seconds

    def mean(self, arrays: Sequence[Array], weight: float) -> list[Array]:
        """Floats smaller than float32 are summed in float32."""
        arrays = [np.asarray(array) for array in arrays]
        _check_kinds(arrays, "fc", "mean")
        if self.size == 1:
            return [array.copy() if weight else np.zeros_like(array) for array in arrays]
        return self._sum("mean", arrays, weight)

    def sum(self, arrays: Sequence[Array]) -> list[Array]:
        arrays = [np.asarray(array) for array in arrays]
        _check_kinds(arrays, "fciub", "sum")
        return [array.copy() for array in arrays] if self.size == 1 else self._sum("sum", arrays, None)

    def broadcast(self, arrays: Sequence[Array], src: int = 0) -> list[Array]:
        arrays = [np.asarray(array) for array in arrays]
        if any(array.dtype.hasobject for array in arrays):
            raise ConfigError("broadcast takes arrays of numbers, not of Python objects.")
        if self.size == 1:
            return [array.copy() for array in arrays]
        flats = [np.ascontiguousarray(array).reshape(-1).view(_BYTE) for array in arrays]
        path = self._plan("broadcast", arrays, [(flat.size, _BYTE) for flat in flats], lambda dtype: dtype)
        buffers = [_empty(count, dtype) for dtype, count in path.sections]
        for window in path.windows:
            data = buffers[window.section][window.start : window.stop]
            if self.rank == src:
                data.fill(0)  # what lies between arrays travels too
                _fill(data, window, flats, None)
            self._broadcast_window(data, src)
        return _results(path, buffers, arrays)

    def barrier(self) -> None:
        self.sum([np.zeros(1, np.uint8)])

    def close(self) -> None:
        self._closed = True
        self._channels = []
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def _plan(
        self,
        op: str,
        arrays: Sequence[Array],
        layout: Sequence[tuple[int, DType]],
        carrier: Callable[[DType], DType],
        lead_bytes: int = 0,
    ) -> Plan:
        if self._closed:
            raise SyncError(f"{op} on a closed group.")
        key = (op, tuple((array.shape, array.dtype) for array in arrays))
        found = self._plans.get(key)
        if found is None:
            if arrays:
                self._agree(op, arrays)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()  # on all ranks alike: they see the same layouts in the same order
            found = plan(layout, carrier, window_bytes=self._window_bytes, lead_bytes=lead_bytes)
            self._plans[key] = found
        return found

    def _agree(self, op: str, arrays: Sequence[Array]) -> None:
        """Compare layouts once, before relying on them."""
        mine = [op, *(f"{array.dtype.name} {array.shape}" for array in arrays)]
        told = [data.decode().split("\n") for data in self._worker.all_gather("\n".join(mine).encode())]
        for rank, theirs in enumerate(told):
            if theirs != told[0]:
                raise SyncError(_difference(told[0], rank, theirs))

    def _sum(self, op: str, arrays: Sequence[Array], weight: float | None) -> list[Array]:
        lead_bytes = 0 if weight is None else ALIGN_BYTES
        path = self._plan(op, arrays, [(a.size, a.dtype) for a in arrays], _carrier, lead_bytes)
        flats = [array.reshape(-1) for array in arrays]
        buffers = [_empty(count, dtype) for dtype, count in path.sections]
        first, self._turn = self._turn, self._turn + len(path.windows)
        with np.errstate(all="ignore"):  # infinities and NaN are the caller's affair, as in its framework
            for place in range(len(path.windows) + _AHEAD):
                if place < len(path.windows):
                    self._put(first + place, path.windows[place], buffers, flats, weight)
                if place >= _AHEAD:
                    window = path.windows[place - _AHEAD]
                    self._collect(first + place - _AHEAD, window, buffers)
                    if weight is not None:
                        _divide(buffers[window.section], window)
            return _results(path, buffers, arrays)

    def _channel(self, turn: int) -> Channel | None:
        return self._channels[turn % _WINDOWS] if self._channels else None

    def _put(
        self,
        turn: int,
        window: Window,
        buffers: Sequence[Array],
        flats: Sequence[Array],
        weight: float | None,
    ) -> None:
        channel = self._channel(turn)
        own = buffers[window.section][window.start : window.stop]
        if channel is None:
            own.fill(0)  # what lies between arrays travels too
            _fill(own, window, flats, weight)
        else:
            _fill(channel.slot(own.dtype)[: own.size], window, flats, weight)
            channel.post()

    def _collect(self, turn: int, window: Window, buffers: Sequence[Array]) -> None:
        channel, ring = self._channel(turn), self._ring
        out = buffers[window.section][window.start : window.stop]
        if channel is not None and self._where.one_host:
            channel.sum_into(out)
        elif channel is not None and ring is None:
            channel.fetch(out)
        elif ring is not None:
            if channel is not None:
                channel.gather_into(out)
            ring.all_reduce(out)
            if channel is not None:
                channel.publish(out)

    def _broadcast_window(self, data: Array, src: int) -> None:
        channel = self._channel(self._turn)
        self._turn += 1
        here = src in self._where.ranks
        if channel is not None and here:
            self._hand(channel, data, src)
        if self._ring is not None:
            self._ring.broadcast(data, self._where.leader_of[src])
        if channel is not None and not here:
            self._hand(channel, data, self._where.ranks[0])

    def _hand(self, channel: Channel, data: Array, source: int) -> None:
        channel.slot(data.dtype)
        channel.post()
        if self.rank == source:
            channel.publish(data)
        else:
            channel.fetch(data, source=self._where.ranks.index(source))


def _fill(target: Array, window: Window, flats: Sequence[Array], weight: float | None) -> None:
    """Write the pieces of a window; the weight goes before the first, if there is room for it."""
    scale = None if weight is None else target.dtype.type(weight)
    if scale is not None and window.start == 0:
        target[: ALIGN_BYTES // target.itemsize] = scale
    for piece in window.pieces:
        source = flats[piece.array][piece.start : piece.stop]
        out = target[piece.at : piece.at + source.size]
        if scale is None or scale == 1:
            np.copyto(out, source, casting="unsafe")
        elif scale == 0:
            out.fill(0)  # not a product: NaN times 0 is NaN
        else:
            np.multiply(source, scale, out=out, dtype=out.dtype, casting="unsafe")


def _divide(buffer: Array, window: Window) -> None:
    """Divide by the total weight, which came with the section's first window and stays there."""
    weight = buffer[0]
    lead = ALIGN_BYTES // buffer.itemsize
    part = buffer[max(window.start, lead) : window.stop]
    if weight != 0 and weight != 1:
        np.divide(part, weight, out=part)


def _results(path: Plan, buffers: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    results = []
    for (section, place), array in zip(path.places, like, strict=True):
        flat = buffers[section][place]
        if flat.dtype != array.dtype:
            flat = flat.view(array.dtype) if flat.dtype == _BYTE else flat.astype(array.dtype)
        results.append(flat.reshape(array.shape))
    return results


def _empty(count: int, dtype: DType) -> Array:
    """A flat array aligned as frameworks want it."""
    raw = np.empty(count * dtype.itemsize + ALIGN_BYTES, np.uint8)
    address: int = raw.__array_interface__["data"][0]  # `raw.ctypes` is slower than a small exchange's sum
    start = -address % ALIGN_BYTES
    return raw[start : start + count * dtype.itemsize].view(dtype)


def _carrier(dtype: DType) -> DType:
    """The dtype to sum in: small floats lose too much in their own."""
    return _FLOAT32 if _small_float(dtype) else dtype.newbyteorder("=")


def _small_float(dtype: DType) -> bool:
    # Floats that numpy does not know of itself, such as bfloat16, are of kind V and can become float32.
    foreign = dtype.kind == "V" and dtype.names is None and np.can_cast(dtype, _FLOAT32)
    return foreign or (dtype.kind == "f" and dtype.itemsize < _FLOAT32.itemsize)


def _check_kinds(arrays: Sequence[Array], kinds: str, op: str) -> None:
    for array in arrays:
        if array.dtype.kind not in kinds and not _small_float(array.dtype):
            raise ConfigError(
                f"{op} takes arrays of {'floats' if op == 'mean' else 'numbers'}; got {array.dtype.name}."
                + (" Hint: sum() adds up whole numbers." if op == "mean" else "")
            )


def _difference(first: Sequence[str], rank: int, theirs: Sequence[str]) -> str:
    place = next(i for i in range(len(first) + len(theirs)) if first[i : i + 1] != theirs[i : i + 1])
    return (
        f"workers passed different arrays to one exchange. Worker 0: {_brought(first, place)}."
        f" Worker {rank}: {_brought(theirs, place)}.\n"
        "Hint: every worker must build the same model and take the same steps."
    )


def _brought(told: Sequence[str], place: int) -> str:
    whole = f"{told[0]} of {len(told) - 1} arrays"
    return f"{whole}, number {place - 1} is {told[place]}" if 0 < place < len(told) else whole


class FlatLayout:
    """Where each array lies in a buffer of `nbytes` that holds all of them.

    >>> layout = FlatLayout([np.zeros(3, np.float32), np.zeros((2, 2))])
    >>> layout.nbytes, [view.shape for view in layout.views(np.zeros(layout.nbytes, np.uint8))]
    (96, [(3,), (2, 2)])
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._kinds = [(array.shape, array.dtype) for array in arrays]
        self._starts: list[int] = []
        end = 0
        for array in arrays:
            self._starts.append(-(-end // ALIGN_BYTES) * ALIGN_BYTES)
            end = self._starts[-1] + array.nbytes
        self.nbytes = end

    def views(self, buffer: Any) -> list[Array]:
        return [
            np.ndarray(shape, dtype, buffer, offset=start)
            for (shape, dtype), start in zip(self._kinds, self._starts, strict=True)
        ]


class GatherCollective:
    """A `Collective` over `Group.gather`. It goes on without ranks that died, if the engine does."""

    def __init__(self, worker: Group) -> None:
        self.rank, self.size = worker.rank, worker.size
        self._worker = worker
        self._waiting = Waiting()

    @property
    def waited_s(self) -> float:
        return self._waiting.seconds

    def sum(self, arrays: Sequence[Array]) -> list[Array]:
        return self._added(arrays, [1.0] * self.size)

    def mean(self, arrays: Sequence[Array], weight: float) -> list[Array]:
        with self._waiting:
            gathered = self._worker.all_gather(_WEIGHT.pack(weight))
        weights = [_WEIGHT.unpack(part)[0] if part else 0.0 for part in gathered]
        whole = sum(weights)
        return self._added(arrays, [part / whole if whole else 0.0 for part in weights])

    def broadcast(self, arrays: Sequence[Array], src: int = 0) -> list[Array]:
        layout = FlatLayout(arrays)
        data = _packed(layout, arrays) if self.rank == src else b""
        with self._waiting:
            whole = self._worker.gather(data, [src])[src]
        if not whole and layout.nbytes:
            raise SyncError(f"worker {src} died while the others waited for its data.")
        return [view.copy() for view in layout.views(whole)] if layout.nbytes else list(arrays)

    def barrier(self) -> None:
        with self._waiting:
            self._worker.barrier()

    def close(self) -> None:
        """Nothing to close."""

    def _added(self, arrays: Sequence[Array], shares: Sequence[float]) -> list[Array]:
        layout = FlatLayout(arrays)
        with self._waiting:
            gathered = self._worker.all_gather(_packed(layout, arrays))
        totals = [np.zeros_like(array) for array in arrays]
        for part, share in zip(gathered, shares, strict=True):
            if not share or not part:
                continue
            for total, view in zip(totals, layout.views(part), strict=True):
                if share == 1.0:
                    total += view
                else:
                    total += (view * share).astype(total.dtype, copy=False)
        return totals


class MeanAtHub(GatherCollective):
    """Averages at the hub, so that each rank sends its arrays once and gets one answer.

    Ranks exchange nothing directly, so another process can take the place of one that dies.
    """

    def mean(self, arrays: Sequence[Array], weight: float) -> list[Array]:
        kinds = [np.asarray(array) for array in arrays]
        with self._waiting:
            means = self._worker.mean([_wide(array) for array in kinds], weight)
        return [
            mean.astype(array.dtype).reshape(array.shape)  # also where it was widened
            for mean, array in zip(means, kinds, strict=True)
        ]


def _wide(array: Array) -> Array:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat if flat.dtype.kind in "fc" and flat.dtype.itemsize >= 4 else flat.astype(np.float32)


def _packed(layout: FlatLayout, arrays: Sequence[Array]) -> bytes:
    buffer = np.zeros(layout.nbytes, np.uint8)
    for view, array in zip(layout.views(buffer), arrays, strict=True):
        np.copyto(view, array)
    return buffer.tobytes()
