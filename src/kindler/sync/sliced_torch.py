"""Sums of torch's gradients, of which each rank gets its slice, and slices of parameters that all ranks get.

`SlicedGradients` exchanges gradients as `GradientSync` does, while backward still runs, but a rank only gets
the sums of what it owns. Its caller then moves that part of the parameters, and `spread` brings it to all
ranks. The routes are in `slice_buckets_torch.py`; how an optimizer is made to move parts of parameters is the
caller's affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from kindler.errors import ConfigError
from kindler.sync.allreduce_torch import TorchExchange
from kindler.sync.arrays_torch import TORCH
from kindler.sync.buckets_torch import Bucket
from kindler.sync.gradients_torch import GradientSync, Load, Member, laid_out_as, lies_dense, reals
from kindler.sync.shared_memory import ALIGN_BYTES, Channel, channels
from kindler.sync.slice_buckets_torch import OneHostSlices, RingSlices, SliceBucket, SummedSlices
from kindler.sync.slice_plan import Share, by_elements, by_parameters


@dataclass(slots=True, eq=False)
class Piece:
    """A part of a parameter, which one rank moves.

    Attributes:
        parameter: The whole parameter.
        start: The first of its elements, as they lie in memory.
        stop: The element after the last.
        span: Where the part lies in its bucket.
        result: Where the sum of its gradients comes, on the rank that owns it.
        part: The part itself, in the parameter's own memory, and on the rank that owns it its gradient. It
            has the parameter's shape where it is the whole of it, and one dimension otherwise.
        flat: The part in the parameter's memory, as real numbers.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    span: slice
    result: torch.Tensor
    part: torch.nn.Parameter
    flat: torch.Tensor

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.stop - self.start == self.parameter.numel()

    def find(self) -> None:
        """Point to where the parameter's memory is now."""
        if not lies_dense(self.parameter):
            self.parameter.data = self.parameter.data.contiguous()
        own = _in_memory(self.parameter)[self.start : self.stop]
        self.part.data = self.parameter.data if self.is_whole else own
        self.flat = torch.view_as_real(own).view(-1) if own.is_complex() else own


class SliceExchange(TorchExchange):
    """One rank's end of the exchange of slices; arguments as for `TorchExchange`."""

    _contiguous = True

    def sliced(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        whole: bool,
        one_copy: bool = False,
        **options: int,
    ) -> SlicedGradients:
        """The exchange of these parameters' gradients by slices.

        Args:
            parameters: Those whose gradients are exchanged.
            whole: Whether to cut between parameters only.
            one_copy: Whether ranks keep one copy of the parameters, where all of them share memory.
            options: Sizes of buckets.
        """
        self._contiguous = not whole
        shared = self.device.type == "cpu" and self._where.one_host
        return SlicedGradients(parameters, self, whole=whole, one_copy=one_copy and shared, **options)

    def board(self, elements: int, dtype: torch.dtype) -> tuple[torch.Tensor, Channel]:
        """Memory that all ranks, of one host, have in common, and what they meet through; all call it."""
        share = -(-elements * dtype.itemsize // self.size)
        [channel] = channels(self._worker, self._host, [-(-share // ALIGN_BYTES) * ALIGN_BYTES], TORCH)
        return channel.board(dtype)[:elements], channel

    @property
    def order(self) -> list[int]:
        """The ranks in the order of their slices: those of one host side by side."""
        return sorted(range(self.size), key=lambda rank: (self._where.leader_of[rank], rank))

    def _bucket(self, elements: int, dtype: torch.dtype, route: Channel | None) -> Bucket:
        where, network = self._where, self._network
        if self.device.type == "cpu" and where.one_host and route is not None:
            return OneHostSlices(elements, dtype, route, None, leads=where.leads, alone=True)
        if self.device.type == "cpu" and not where.one_host and self._contiguous:
            return RingSlices(elements, dtype, route, network, where)
        return SummedSlices(super()._bucket(elements, dtype, route), self.rank)


class SlicedGradients(GradientSync):
    """Sums gradients over ranks, each of which gets those of its pieces; see `GradientSync`.

    Args:
        parameters: Those whose gradients are exchanged; ones that need none are left out.
        group: Where the buckets come from.
        whole: Whether parameters are left whole.
        one_copy: Whether the ranks, all of one host, keep one copy of the parameters.
        options: Sizes of buckets.

    Attributes:
        parameters: All that were taken in, in the order of their numbers.
        pieces: Those of this rank.
        one_copy: As given.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        group: SliceExchange,
        *,
        whole: bool,
        one_copy: bool = False,
        **options: int,
    ) -> None:
        self.one_copy = one_copy
        self.parameters: list[torch.nn.Parameter] = []
        self.pieces: list[Piece] = []
        self._slices = group
        self._whole = whole
        self._totals = [0] * group.size
        self._everybodys: list[Piece] = []
        self._memory: list[int] = []
        self._own: dict[int, list[tuple[int, Piece]]] = {}
        super().__init__(parameters, group, **options)
        [self._number] = group.buckets([(1, torch.float64)])

    def total(self, number: float) -> float:
        """The sum of one number over ranks; every rank calls it."""
        bucket = self._number
        bucket.begin()
        bucket.fill[0] = number
        bucket.launch()
        bucket.push(block=True)
        bucket.wait()
        return float(bucket.result[0].item())

    def spread(self) -> None:
        """Bring what this rank's pieces are now to all ranks, and take over theirs."""
        buckets = [cast(SliceBucket, load.bucket) for load in self._loads if load.members]
        for bucket in buckets:
            bucket.publish()
        for bucket in buckets:
            bucket.collect()

    def flattened(self, values: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Values of the parameter's shape, in the order in which its elements lie in memory."""
        flat = torch.empty(parameter.numel(), dtype=values.dtype, device=values.device)
        laid_out_as(parameter, flat).copy_(values)
        return flat

    def shaped(self, flat: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        """What `flattened` was given."""
        return laid_out_as(parameter, flat)

    def finish(self, scale: torch.Tensor | None = None) -> None:
        """Send what backward did not, wait for the sums and put them into this rank's pieces."""
        memory = [parameter.data_ptr() for parameter in self.parameters]
        if memory != self._memory:  # user code has given a parameter other memory since the last step
            if self.one_copy:
                raise ConfigError(
                    "sync='sharded': the model or a callback has given a parameter other memory, but workers"
                    " share one copy of the parameters.\nHint: leave one_copy out of sync_options."
                )
            self._find_memory()
        super().finish(scale)

    def _made(
        self, parameters: Iterable[torch.nn.Parameter], first_bytes: int, *, weigher: bool = False
    ) -> list[Load]:
        loads = super()._made(parameters, first_bytes, weigher=weigher)
        for load in loads:
            if load.members:
                self._divide(load)
        self._find_memory()
        return loads

    def _divide(self, load: Load) -> None:
        sizes = [member.parameter.numel() for member in load.members]
        dealt: list[list[Share]] = [[] for _ in range(self._slices.size)]
        if self._whole:
            dealt = by_parameters(sizes, self._totals)
        else:
            for rank, shares in zip(self._slices.order, by_elements(sizes, self._slices.size), strict=True):
                dealt[rank] = shares
        starts = [0]
        for member in load.members:
            starts.append(starts[-1] + reals(member.parameter))
        by_rank = [
            [_piece(load.members[share.place], share, starts[share.place]) for share in shares]
            for shares in dealt
        ]
        mine = by_rank[self._slices.rank]
        places = [share.place for share in dealt[self._slices.rank]]
        self._own[id(load)] = list(zip(places, mine, strict=True))
        self.parameters += [member.parameter for member in load.members]
        self.pieces += mine
        self._everybodys += [piece for pieces in by_rank for piece in pieces]
        cast(SliceBucket, load.bucket).divide(by_rank, load.flags.start)
        if self.one_copy:
            self._share(load, starts)

    def _share(self, load: Load, starts: Sequence[int]) -> None:
        """Let all ranks have one memory for the parameters of this load; they have the same values now."""
        board, meeting = self._slices.board(starts[-1], load.bucket.fill.dtype)
        for member, start in zip(load.members, starts, strict=False):
            parameter = member.parameter
            part = board[start : start + reals(parameter)].view(parameter.dtype)
            place = laid_out_as(parameter, part)
            if self._slices.rank == 0:
                place.copy_(parameter.detach())
            parameter.data = place
        meeting.post()
        meeting.await_all()
        cast(OneHostSlices, load.bucket).share(meeting)

    def _find_memory(self) -> None:
        for piece in self._everybodys:
            piece.find()
        self._memory = [parameter.data_ptr() for parameter in self.parameters]

    def _hand_over(self, load: Load) -> None:
        own = self._own.get(id(load), ())
        flags: list[float] | None = None
        for place, piece in own:
            used = load.members[place].filled
            if not used:
                flags = load.bucket.result[load.flags].tolist() if flags is None else flags
                used = flags[place] > 0
            piece.part.grad = piece.result if used else None
        if self._factor_used is not None and own:
            torch._foreach_mul_([piece.result for _, piece in own], self._factor_used)
        for member in load.members:
            member.parameter.grad = None


def _piece(member: Member, share: Share, start: int) -> Piece:
    parameter = member.parameter
    width = 2 if parameter.is_complex() else 1
    whole = share.stop - share.start == parameter.numel()
    return Piece(
        parameter=parameter,
        start=share.start,
        stop=share.stop,
        span=slice(start + share.start * width, start + share.stop * width),
        result=member.result if whole else _in_memory(member.result)[share.start : share.stop],
        part=torch.nn.Parameter(parameter.detach()),
        flat=parameter.detach(),
    )


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order in which they lie in its memory, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
