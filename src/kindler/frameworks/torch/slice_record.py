"""What only one rank has of a divided optimizer, in a file in memory that outlives the process.

The optimizer's state lives in the file; before each step it is copied to a second place there. So the file
holds the state after the last whole step, whenever the process dies: for the process that takes its place,
and for this one, which may have made a step that another rank could not complete.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from kindler.errors import SyncError
from kindler.frameworks.torch.exchange import is_dense
from kindler.frameworks.torch.exchange_slices import Piece, copy_all

_NUMBER, _HEAD = struct.Struct("<q"), struct.Struct("<4q")
_NOW, _BEFORE, _LAYOUT, _LAYOUT_BYTES = range(4)  # at the beginning: two steps (-1: none), and a span
_ALIGNED = 64
_PAGE = mmap.PAGESIZE

State = MutableMapping[Any, dict[str, Any]]


class SliceRecord:
    """`file` is this rank's own; `former` that of the process whose place this one takes."""

    def __init__(self, file: int, former: str = "") -> None:
        self._file, self._former = file, former
        self._head: Any = None
        self._given_up = False
        self._parts: list[dict[str, torch.Tensor]] = []  # the state of each slice, in the file
        self._now = self._before = torch.empty(0, dtype=torch.uint8)
        self._weights: list[torch.Tensor] = []  # before the step
        self._groups: list[dict[str, Any]] = []

    def begin(self, slices: Sequence[Piece], state: State, step: int) -> None:
        """Fill `state` with what is known of these slices after `step`, and keep it from now on."""
        if self._former:
            self._take_over(slices, state, step)
            self._former = ""
        for each, kept in zip(slices, self._parts, strict=False):
            if kept:
                state[each.part] = dict(kept)
        self.after(slices, state, step)

    def before(self, optimizer: torch.optim.Optimizer, slices: Sequence[Piece]) -> None:
        """The optimizer is about to move these slices."""
        if self._given_up:
            return
        self._set(_BEFORE, -1)
        self._before.copy_(self._now)
        self._weights = self._weights or [torch.empty_like(each.flat) for each in slices]
        copy_all((kept, each.flat) for kept, each in zip(self._weights, slices, strict=True))
        self._groups = [_copied(group) for group in optimizer.param_groups]
        self._set(_BEFORE, self._get(_NOW))
        self._set(_NOW, -1)

    def after(self, slices: Sequence[Piece], state: State, step: int) -> None:
        """They are moved; before any other rank can know it."""
        if self._given_up:
            return
        own = [state.get(each.part) or {} for each in slices]
        if self._head is None or not _alike(self._parts, own):
            self._lay_out(slices, own)
        for kept, values in zip(self._parts, own, strict=False):
            for key, tensor in kept.items():
                if values[key] is not tensor:
                    tensor.copy_(values[key])
                    values[key] = tensor
        if not self._given_up:
            self._set(_NOW, step)

    def go_back(
        self, optimizer: torch.optim.Optimizer, slices: Sequence[Piece], state: State, step: int
    ) -> bool:
        """Whether all is now as it was after `step`."""
        if self._given_up or self._head is None:
            return False
        if self._get(_NOW) == step:
            return True
        if self._get(_BEFORE) != step:
            return False
        self._now.copy_(self._before)
        copy_all((each.flat, kept) for kept, each in zip(self._weights, slices, strict=True))
        for group, values in zip(optimizer.param_groups, self._groups, strict=True):
            group |= values
        for each, kept in zip(slices, self._parts, strict=True):
            state[each.part] = dict(kept)
        self._set(_NOW, step)
        return True

    def give_up(self) -> None:
        self._given_up = True
        if self._head is not None:
            self._set(_NOW, -1)
            self._set(_BEFORE, -1)

    def _lay_out(self, slices: Sequence[Piece], own: Sequence[Mapping[str, Any]]) -> None:
        """Make room for the state as it is; what was kept before is void."""
        values = [value for state in own for value in state.values()]
        if not all(isinstance(v, torch.Tensor) and v.layout is torch.strided for v in values):
            self.give_up()
            return
        rows, size = [], 0
        for state in own:
            row = []
            for key, value in state.items():
                like = value if is_dense(value) else value.contiguous()
                row.append(
                    [
                        key,
                        str(value.dtype).removeprefix("torch."),
                        list(value.shape),
                        list(like.stride()),
                        size,
                    ]
                )
                size += -(-value.nbytes // _ALIGNED) * _ALIGNED
            rows.append(row)
        now = max(_PAGE, -(-os.fstat(self._file).st_size // _PAGE) * _PAGE)
        before, end = now + size, now + 2 * size
        places = {"slices": _described(slices), "state": rows, "now": now, "before": before, "end": end}
        layout = json.dumps(places).encode()
        try:
            os.posix_fallocate(self._file, 0, end + len(layout))
            mapping = mmap.mmap(self._file, end + len(layout))
        except OSError:  # no room for it
            self.give_up()
            return
        mapping[end:] = layout
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        self._now, self._before = whole[now:before], whole[before:end]
        self._parts = _tensors(rows, self._now)
        self._head = mapping
        self._set(_NOW, -1)
        self._set(_BEFORE, -1)
        self._set(_LAYOUT, end)
        self._set(_LAYOUT_BYTES, len(layout))

    def _take_over(self, slices: Sequence[Piece], state: State, step: int) -> None:
        try:
            file = os.open(self._former, os.O_RDONLY)
        except OSError as exc:
            raise SyncError(f"the optimizer's state of the lost worker cannot be read: {exc}") from exc
        try:
            now, before, start, size = _HEAD.unpack(os.pread(file, _HEAD.size, 0))
            layout = json.loads(os.pread(file, size, start))
            mapping = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(file)
        if step not in (now, before) or layout["slices"] != _described(slices):
            raise SyncError(
                "the optimizer's state of the lost worker is that of other slices or of another step.\n"
                "Hint: fit(checkpoint=...) writes checkpoints, from which the run restarts."
            )
        kept = torch.frombuffer(mapping, dtype=torch.uint8)
        kept = kept[layout["now"] :] if now == step else kept[layout["before"] :]
        for each, tensors in zip(slices, _tensors(layout["state"], kept), strict=True):
            if tensors:
                state[each.part] = {key: tensor.clone() for key, tensor in tensors.items()}

    def _get(self, place: int) -> int:
        [number] = _NUMBER.unpack_from(self._head, place * _NUMBER.size)
        return int(number)

    def _set(self, place: int, number: int) -> None:
        _NUMBER.pack_into(self._head, place * _NUMBER.size, number)


def holds(file: int, step: int) -> bool:
    """Whether the record in this file is, or has, that of this step."""
    head = os.pread(file, _HEAD.size, 0)
    return len(head) == _HEAD.size and step in _HEAD.unpack(head)[:2]


def _described(slices: Sequence[Piece]) -> list[Any]:
    return [[each.start, each.stop, list(each.parameter.shape)] for each in slices]


def _tensors(rows: Sequence[Sequence[Any]], memory: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    made = []
    for row in rows:
        tensors = {}
        for key, name, shape, strides, start in row:
            dtype = getattr(torch, name)
            count = math.prod(shape)
            flat = memory[start : start + count * dtype.itemsize].view(dtype)
            tensors[key] = flat.as_strided(shape, strides)
        made.append(tensors)
    return made


def _alike(parts: Sequence[Mapping[str, torch.Tensor]], own: Sequence[Mapping[str, Any]]) -> bool:
    return len(parts) == len(own) and all(
        kept.keys() == values.keys()
        and all(
            value is kept[key]
            or (
                isinstance(value, torch.Tensor)
                and (value.shape, value.dtype) == (kept[key].shape, kept[key].dtype)
            )
            for key, value in values.items()
        )
        for kept, values in zip(parts, own, strict=True)
    )


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
