"""The user's own optimizer on the slice of the parameters that this rank owns (strategy="zero1").

Between steps the optimizer looks as the user built it, with whole parameters in its groups, so schedules and
hooks work; during a step its groups and state are those of this rank's parts. The whole state, in torch's
format, exists only on the first rank, for checkpoints and results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from kindler.collective import Collective, share_bytes
from kindler.errors import ConfigError
from kindler.frameworks.torch import private
from kindler.frameworks.torch.exchange import (
    TORCH,
    Bucket,
    Filled,
    GradientSync,
    Load,
    Member,
    Network,
    TorchExchange,
    Wait,
    is_dense,
    laid_out_as,
    reals,
)
from kindler.frameworks.torch.spec import TorchSpec, optimizer_kind
from kindler.frameworks.torch.state import dump, parse, state_bytes
from kindler.sync.shared_memory import Channel, shared_array

if TYPE_CHECKING:
    from kindler.frameworks.torch.slice_record import SliceRecord

_BY_ELEMENT = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
_DIVISIONS = dict.fromkeys((*_BY_ELEMENT, "SGD"), "elements") | {
    "Adafactor": "parameters",
    "Muon": "parameters",
}
_CHUNK_BYTES = 64 << 20


Share: TypeAlias = tuple[int, int, int]  # the place of a parameter, and where in it the share begins and ends


def by_elements(sizes: Sequence[int], ranks: int) -> list[list[Share]]:
    """For each rank its shares of parameters of these sizes: slices that differ by one element at most.

    >>> by_elements([5, 1, 2], 2)
    [[(0, 0, 4)], [(0, 4, 5), (1, 0, 1), (2, 0, 2)]]
    """
    total = sum(sizes)
    bounds = [rank * total // ranks for rank in range(ranks + 1)]
    shares: list[list[Share]] = [[] for _ in range(ranks)]
    begin = 0
    for place, size in enumerate(sizes):
        for rank in range(ranks):
            start, stop = max(bounds[rank], begin), min(bounds[rank + 1], begin + size)
            if start < stop:
                shares[rank].append((place, start - begin, stop - begin))
        begin += size
    return shares


def by_parameters(sizes: Sequence[int], loads: list[int]) -> list[list[Share]]:
    """Give each rank whole parameters: large ones first, to the rank with the smallest load.

    `loads` is each rank's load so far, and is updated.

    >>> by_parameters([3, 9, 4], loads := [0, 0])
    [[(1, 0, 9)], [(0, 0, 3), (2, 0, 4)]]
    >>> loads
    [9, 7]
    """
    owners = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owner = owners[place] = loads.index(min(loads))
        loads[owner] += sizes[place]
    return [
        [(place, 0, size) for place, size in enumerate(sizes) if size and owners[place] == rank]
        for rank in range(len(loads))
    ]


class Piece:
    """A part of a parameter, which one rank moves.

    `start` and `stop` count elements in memory order; `span` is its place in the bucket, where the
    parameter's values begin at `begin`. `part` shares the parameter's memory (in its shape if it is all of
    it, else flat); `flat` is the same as real numbers.
    """

    def __init__(self, member: Member, share: Share, begin: int) -> None:
        _, self.start, self.stop = share
        self.parameter = member.parameter
        width = 2 if self.parameter.is_complex() else 1
        self.span = slice(begin + self.start * width, begin + self.stop * width)
        self.is_whole = self.stop - self.start == self.parameter.numel()
        self.result = member.result
        if not self.is_whole:
            self.result = _in_memory(member.result)[self.start : self.stop]
        self.part = torch.nn.Parameter(self.parameter.detach())
        self.find()

    def find(self) -> None:
        if not is_dense(self.parameter):
            self.parameter.data = self.parameter.data.contiguous()
        own = _in_memory(self.parameter)[self.start : self.stop]
        self.part.data = self.parameter.data if self.is_whole else own
        self.flat = torch.view_as_real(own).view(-1) if own.is_complex() else own


class SliceBucket(Bucket):
    """A round of gradients is followed by one of parameters in the same memory: `publish`, `collect`, `take`.

    Only `take` changes parameters, and it does not fail.
    On one host each rank reads the others' slots. Between hosts the first rank of each takes part in a
    reduce-scatter and an all-gather for its host, whose slices lie side by side.
    """

    by_rank: Sequence[Sequence[Piece]] = ()
    meeting: Channel | None = None  # where ranks share one copy of the parameters: there is nothing to send

    def divide(self, by_rank: Sequence[Sequence[Piece]], values: int) -> None:
        """All ranks get the sum beyond `values`; before this call, all sums."""
        where = self.where
        of_hosts = [0] * len(where.leaders)
        for rank, pieces in enumerate(by_rank):
            of_hosts[where.leader_of[rank]] += sum(piece.span.stop - piece.span.start for piece in pieces)
        self.by_rank, self._values = by_rank, self.result[:values]
        shared = self.channel if where.one_host else None
        slots = None if shared is None else shared.slots(self.fill.dtype)
        self._incoming = [
            (piece, (self._values if slots is None else slots[rank])[piece.span])
            for rank, pieces in enumerate(by_rank)
            if rank != where.rank
            for piece in pieces
        ]
        self._bounds = [sum(of_hosts[:place]) for place in range(len(of_hosts) + 1)]
        rest, host = slice(values, len(self.result)), where.leader_of[where.rank]
        self.parts = [*joined(piece.span for piece in by_rank[where.rank]), rest]
        self.host_parts = [slice(self._bounds[host], self._bounds[host + 1]), rest]

    def start(self, network: Network) -> list[Wait]:
        if not self.by_rank:
            return super().start(network)
        waits = [network.all_reduce(self.result[len(self._values) :])]
        if len(self._values):
            waits.append(network.reduce_scatter(self._values, self._bounds))
        return waits

    def publish(self) -> None:
        if self.meeting is not None:
            self.meeting.post()
            return
        self.begin()
        copy_all((self.fill[piece.span], piece.flat) for piece in self.by_rank[self.where.rank])
        if self.channel is not None:
            self.channel.post()

    def collect(self) -> None:
        if self.meeting is not None:
            self.meeting.await_all()
        elif self.channel is not None and self.where.one_host:
            self.channel.await_all()
        else:
            self._collect_between_hosts()

    def take(self) -> None:
        if self.meeting is not None:
            return
        copy_all((piece.flat, source) for piece, source in self._incoming)
        if self.channel is not None and self.where.one_host:
            self.channel.skip()

    def _collect_between_hosts(self) -> None:
        channel, values = self.channel, self._values
        if self.network is None:
            assert channel is not None, "a rank that does not lead shares memory with one that does"
            channel.fetch(values)
            return
        if channel is not None:
            channel.await_all()
            for rank, slot in zip(self.where.ranks, channel.slots(values.dtype), strict=True):
                copy_all((values[piece.span], slot[piece.span]) for piece in self.by_rank[rank])
        self.network.all_gather(values, self._bounds)()
        if channel is not None:
            channel.publish(values)


class SummedSlices:
    """Slices over any bucket: all ranks get all sums; parameters are sums of zeros and one rank's values."""

    def __init__(self, inner: Any, rank: int) -> None:
        self.fill, self.result = inner.fill, inner.result
        self.begin, self.launch, self.push, self.wait = inner.begin, inner.launch, inner.push, inner.wait
        self._rank = rank

    def divide(self, by_rank: Sequence[Sequence[Piece]], values: int) -> None:
        self._own = by_rank[self._rank]
        self._others = [p for rank, pieces in enumerate(by_rank) if rank != self._rank for p in pieces]

    def publish(self) -> None:
        self.begin()
        self.fill.zero_()
        copy_all((self.fill[piece.span], piece.flat) for piece in self._own)
        self.launch()

    def collect(self) -> None:
        self.wait()

    def take(self) -> None:
        copy_all((piece.flat, self.result[piece.span]) for piece in self._others)


def joined(spans: Iterable[slice]) -> list[slice]:
    """Spans in their order, those that touch as one.

    >>> joined([slice(0, 2), slice(2, 5), slice(7, 9)])
    [slice(0, 5, None), slice(7, 9, None)]
    """
    merged: list[slice] = []
    for span in spans:
        if merged and merged[-1].stop == span.start:
            merged[-1] = slice(merged[-1].start, span.stop)
        else:
            merged.append(span)
    return merged


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if both := list(pairs):
        private.foreach_copy_([target for target, _ in both], [source for _, source in both])


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in memory order, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def against_division(spec: TorchSpec, asked: str | None) -> list[str]:
    """Must not run a creator."""
    kind = optimizer_kind(spec.optimizer)
    if not issubclass(kind, torch.optim.Optimizer):
        return []
    try:
        division_of(kind, asked)
    except ConfigError as exc:
        return [str(exc)]
    return []


def division_of(kind: type[torch.optim.Optimizer], asked: str | None) -> str:
    """`asked` is the user's claim, needed for unknown optimizers and refused if known to be wrong."""
    own = kind is getattr(torch.optim, kind.__name__, None)
    known = _DIVISIONS.get(kind.__name__) if own else None
    if known == "parameters" and asked == "elements":
        raise ConfigError(
            f"optimizer {kind.__name__} updates a parameter as a whole (by its rows and columns), "
            "so it cannot be divided into elements.\nHint: strategy='zero1' keeps parameters "
            "whole for it, unless strategies.Zero1(divide=...) says otherwise."
        )
    if (division := asked or known) is None:
        raise ConfigError(
            f"it is unknown whether the work of optimizer {kind.__name__} can be divided: each worker would"
            " run it on a part of the parameters.\nHint: strategies.Zero1(divide='elements') if it updates "
            "each element of a parameter from that element's gradients alone, as Adam does;"
            " strategies.Zero1(divide='parameters') if it updates each parameter from its own gradients "
            "alone, as"
            " Adafactor does; strategy='allreduce' otherwise."
        )
    return division


class DividedOptimizer(GradientSync):
    """Sums gradients, and takes over the optimizer's state of the parameters that it divides.

    `whole` cuts between parameters only; `one_copy` needs ranks that all share memory. A `record` keeps what
    only this rank has, from its `step` on.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        exchange: TorchExchange,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        *,
        whole: bool,
        one_copy: bool = False,
        record: SliceRecord | None = None,
        step: int = 0,
    ) -> None:
        self._optimizer, self._collective = optimizer, collective
        self._record, self._goes_back = record, False
        self._parts: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        self._gathered: dict[torch.nn.Parameter, dict[str, Any]] | None = None
        self._unseen = True
        self._parameters: list[torch.nn.Parameter] = []
        self._pieces: list[Piece] = []
        self._one_copy = one_copy and exchange.device.type == "cpu" and exchange.where.one_host
        self._whole = whole
        self._totals = [0] * exchange.size
        self._all_pieces: list[Piece] = []
        self._memory: list[int] = []
        self._own: dict[Load, list[tuple[int, Piece]]] = {}
        super().__init__(parameters, exchange)
        if record is not None:
            record.begin(self._pieces, self._state, step)

    def extend(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if self._record is not None:
            self._record.give_up()  # whoever takes this rank's place would divide otherwise
        super().extend(parameters)

    def go_back(self, step: int) -> bool:
        """Whether this rank's slices are now as they were after `step`; `state_dict` is without them then."""
        self._goes_back = True
        record = self._record
        return record is not None and record.go_back(self._optimizer, self._pieces, self._state, step)

    def finish(self, filled: Filled | None = None) -> None:
        memory = [parameter.data_ptr() for parameter in self._parameters]
        if memory != self._memory:  # user code has given a parameter other memory since the last step
            if self._one_copy:
                raise ConfigError(
                    "strategy='zero1': the model or a callback has moved a parameter to other memory, but"
                    " workers share one copy of the parameters.\nHint: leave one_copy out."
                )
            self._find_memory()
        super().finish(filled)

    def _bucket(self, elements: int, dtype: torch.dtype, channel: Channel | None) -> Any:
        exchange = self.exchange
        if exchange.staged or (self._whole and not exchange.where.one_host):
            return SummedSlices(exchange.bucket(elements, dtype, channel), exchange.rank)
        return SliceBucket(exchange, elements, dtype, channel)

    def _made(
        self, parameters: Iterable[torch.nn.Parameter], first_bytes: int, *, weigher: bool = False
    ) -> list[Load]:
        loads = super()._made(parameters, first_bytes, weigher=weigher)
        known = len(self._pieces)
        for load in loads:
            if load.members:
                self._divide(load)
        self._find_memory()
        for piece in self._pieces[known:]:
            self._parts[piece.parameter] = piece.part
            if whole := self._optimizer.state.get(piece.parameter):
                self._state[piece.part] = self._cut(whole, piece)
        for load in loads:
            for member in load.members:
                self._optimizer.state.pop(member.parameter, None)
        self._gathered = None
        return loads

    def _divide(self, load: Load) -> None:
        sizes = [member.parameter.numel() for member in load.members]
        exchange = self.exchange
        shares: list[list[Share]] = [[] for _ in range(exchange.size)]
        if self._whole:
            shares = by_parameters(sizes, self._totals)
        else:  # those of one host side by side
            order = sorted(range(exchange.size), key=lambda rank: (exchange.where.leader_of[rank], rank))
            for rank, own in zip(order, by_elements(sizes, exchange.size), strict=True):
                shares[rank] = own
        begins = [0]
        for member in load.members:
            begins.append(begins[-1] + reals(member.parameter))
        by_rank = [
            [Piece(load.members[share[0]], share, begins[share[0]]) for share in own] for own in shares
        ]
        mine = by_rank[exchange.rank]
        self._own[load] = [
            (share[0], piece) for share, piece in zip(shares[exchange.rank], mine, strict=True)
        ]
        self._parameters += [member.parameter for member in load.members]
        self._pieces += mine
        self._all_pieces += [piece for pieces in by_rank for piece in pieces]
        load.bucket.divide(by_rank, load.flags.start)
        if self._one_copy:
            self._share(load, begins)

    def _share(self, load: Load, begins: Sequence[int]) -> None:
        """The parameters must be equal on all ranks."""
        exchange, dtype = self.exchange, load.bucket.fill.dtype
        nbytes = begins[-1] * dtype.itemsize
        memory, meeting = shared_array(exchange.worker, exchange.where, nbytes, dtype, TORCH)
        for member, begin in zip(load.members, begins, strict=False):
            parameter = member.parameter
            part = memory[begin : begin + reals(parameter)].view(parameter.dtype)
            place = laid_out_as(parameter, part)
            if exchange.rank == 0:
                place.copy_(parameter.detach())
            parameter.data = place
        meeting.post()
        meeting.await_all()
        load.bucket.meeting = meeting

    def _find_memory(self) -> None:
        for piece in self._all_pieces:
            piece.find()
        self._memory = [parameter.data_ptr() for parameter in self._parameters]

    def _hand_over(self, load: Load) -> None:
        if own := self._own.get(load, []):
            has_gradient = load.has_gradient()
            for place, piece in own:
                piece.part.grad = piece.result if has_gradient[place] else None
            if self._factor is not None:
                private.foreach_mul_([piece.result for _, piece in own], self._factor)
        for member in load.members:
            member.parameter.grad = None

    def update(
        self, step: Callable[[Any], None], clip_norm: float | None, clip_value: float | None, *, number: int
    ) -> None:
        """Make step `number`."""
        self._gathered = None
        parts = [piece.part for piece in self._pieces]
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(parts, clip_value)
        if clip_norm is not None:
            norm = torch.nn.utils.get_total_norm([part.grad for part in parts if part.grad is not None])
            [[square]] = self._collective.sum([np.array([float(norm) ** 2])])
            torch.nn.utils.clip_grads_with_norm_(parts, clip_norm, torch.tensor(float(np.sqrt(square))))
        if self._record is not None:
            self._record.before(self._optimizer, self._pieces)
        with self._on_parts():
            step(self._optimizer)
        if self._record is not None:
            self._record.after(self._pieces, self._state, number)
        for part in parts:
            part.grad = None
        if self._unseen:
            self._refuse_shapes()
            self._unseen = False
        buckets = [load.bucket for load in self._loads if load.members]
        for bucket in buckets:
            bucket.publish()
        for bucket in buckets:
            bucket.collect()
        for bucket in buckets:
            bucket.take()

    @property
    def nbytes(self) -> int:
        return state_bytes(self._state)

    def gather(self) -> None:
        """Collects the state on the first rank, until the next step; every rank calls it."""
        if self._gathered is not None:  # so it is on all ranks
            return
        whole: dict[torch.nn.Parameter, dict[str, Any]] = {}
        for source in range(self._collective.size):
            for number, start, stop, state in self._pieces_of(source):
                parameter = self._parameters[number]
                if stop - start == parameter.numel():
                    whole[parameter] = state
                    continue
                known = whole.setdefault(parameter, {})
                for key, value in state.items():
                    if not isinstance(value, torch.Tensor) or not value.dim():
                        known[key] = value
                        continue
                    if key not in known:
                        flat = torch.empty(parameter.numel(), dtype=value.dtype)
                        known[key] = laid_out_as(parameter, flat)
                    _in_memory(known[key])[start:stop] = value
        self._gathered = whole

    def state_dict(self) -> dict[str, Any]:
        """Only on the first rank, after `gather`."""
        if self._goes_back:
            return self._optimizer.state_dict()
        if self._gathered is None or self._collective.rank != 0:
            raise ConfigError(
                "the state of the optimizer is divided between the workers, and this one does not have all "
                "of it here.\nHint: the first worker has it at the end of each epoch, as in"
                " `if run.rank == 0: run.write_checkpoint(path)`; within an epoch run.save_checkpoint() asks"
                " for a checkpoint in the folder of fit(checkpoint=...)."
            )
        optimizer = self._optimizer
        kept = optimizer.state
        known: dict[Any, Any] = {**kept, **self._gathered}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.state = defaultdict(dict, {p: known[p] for p in held if p in known})
        try:
            return optimizer.state_dict()
        finally:
            optimizer.state = kept

    @contextmanager
    def _on_parts(self) -> Iterator[None]:
        optimizer, parts = self._optimizer, self._parts
        held, kept = [group["params"] for group in optimizer.param_groups], optimizer.state
        for group, whole in zip(optimizer.param_groups, held, strict=True):
            group["params"] = [parts[parameter] for parameter in whole if parameter in parts]
        optimizer.state = self._state
        try:
            yield
        finally:
            optimizer.state = kept
            for group, whole in zip(optimizer.param_groups, held, strict=True):
                group["params"] = whole

    def _cut(self, whole: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        if piece.is_whole:
            return dict(whole)
        shape = piece.parameter.shape
        made = {}
        for key, value in whole.items():
            if isinstance(value, torch.Tensor) and value.shape == shape:
                flat = torch.empty(shape.numel(), dtype=value.dtype, device=value.device)
                laid_out_as(piece.parameter, flat).copy_(value)
                value = flat[piece.start : piece.stop].clone()
            elif isinstance(value, torch.Tensor):
                value = value.clone()
            made[key] = value
        return made

    def _pieces_of(self, source: int) -> Iterator[list[Any]]:
        """One rank's [number, start, stop, state] of each piece; yields only on the first rank."""
        rank = self._collective.rank
        chunks = list(self._chunks()) if rank == source else []
        [count] = self._collective.broadcast([np.array([len(chunks)], np.int64)], source)
        for number in range(int(count[0])):
            mine = dump({"pieces": chunks[number]}) if rank == source else b""
            data = share_bytes(self._collective, mine, source)
            if rank == 0:
                yield from parse(data)["pieces"]

    def _chunks(self) -> Iterator[list[Any]]:
        self._refuse_shapes()
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        chunk: list[Any] = []
        size = 0
        for piece in self._pieces:
            if not (state := self._state.get(piece.part)):
                continue
            chunk.append([numbers[piece.parameter], piece.start, piece.stop, dict(state)])
            size += sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
            if size >= _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def _refuse_shapes(self) -> None:
        for piece in self._pieces:
            if piece.is_whole:
                continue
            count = piece.stop - piece.start
            for key, value in self._state.get(piece.part, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != (count,):
                    raise ConfigError(
                        f"optimizer {type(self._optimizer).__name__} keeps {key!r} of shape"
                        f" {tuple(value.shape)} for a part of {count} elements of a parameter of shape"
                        f" {tuple(piece.parameter.shape)}: it does not update each element separately.\n"
                        "Hint: strategies.Zero1(divide='parameters')."
                    )
