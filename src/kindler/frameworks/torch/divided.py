"""The user's own optimizer, on the parts of the parameters that this rank owns.

Between steps the optimizer looks as the user built it: its groups hold whole parameters, and learning rates,
schedules and hooks work on it as ever. For the time of a step its groups hold this rank's parts instead, and
its state is that of the parts. The whole state exists only where a checkpoint or the result needs it: ranks
send what they have to the first one, which puts it together in torch's ordinary format.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from kindler.collective import Collective
from kindler.errors import ConfigError
from kindler.frameworks.torch.spec import TorchSpec, optimizer_kind
from kindler.frameworks.torch.state import GradientExchange, dump, parse

_OF_ELEMENTS = (
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
_OF_PARAMETERS = ("Adafactor", "Muon")
_CHUNK_BYTES = 64 << 20


class Piece(Protocol):
    """A part of a parameter that this rank moves: see `kindler.sync.sliced_torch`."""

    parameter: torch.nn.Parameter
    start: int
    stop: int
    part: torch.nn.Parameter

    @property
    def is_whole(self) -> bool: ...


class Slices(GradientExchange, Protocol):
    """The exchange of gradients that leaves each rank with those of its own pieces."""

    parameters: list[torch.nn.Parameter]
    pieces: list[Any]

    def total(self, number: float) -> float: ...

    def spread(self) -> None: ...

    def flattened(self, values: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor: ...

    def shaped(self, flat: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor: ...


def against_division(spec: TorchSpec, asked: str | None) -> list[str]:
    """Why the optimizer's work cannot be divided, as far as it is known without running a creator."""
    kind = optimizer_kind(spec.optimizer)
    if not issubclass(kind, torch.optim.Optimizer):
        return []
    try:
        division_of(kind, asked)
    except ConfigError as exc:
        return [str(exc)]
    return []


def division_of(kind: type[torch.optim.Optimizer], asked: str | None) -> str:
    """What the work of such an optimizer can be divided into: "elements" or "parameters".

    Args:
        kind: Its class.
        asked: What the user says of it.

    Raises:
        ConfigError: It is known to need more than that, or not known and nothing is said.
    """
    known = _known(kind)
    if known == "parameters" and asked == "elements":
        raise ConfigError(
            f"optimizer {kind.__name__} moves a parameter by what the whole of it looks like (its rows and"
            " columns), so it cannot be divided into elements.\nHint: sync='sharded' leaves parameters whole"
            " for it, unless sync_options={'divide': ...} says otherwise."
        )
    if (found := asked or known) is None:
        raise ConfigError(
            f"whether the work of optimizer {kind.__name__} can be divided is not known: each worker would"
            " run it on a part of the parameters.\nHint: sync_options={'divide': 'elements'} if it moves each"
            " element of a parameter by that element's gradients alone, as Adam does;"
            " sync_options={'divide': 'parameters'} if it moves each parameter by its own gradients alone, as"
            " Adafactor does; sync='allreduce' otherwise."
        )
    return found


def _known(kind: type[torch.optim.Optimizer]) -> str | None:
    for names, division in ((_OF_ELEMENTS, "elements"), (_OF_PARAMETERS, "parameters")):
        if any(kind is getattr(torch.optim, name, None) for name in names):
            return division
    return None


class DividedOptimizer:
    """Moves this rank's pieces with the user's optimizer.

    Args:
        optimizer: As the user built it, perhaps with state; the state of what is divided leaves it.
        exchange: What brings gradients to the pieces, and the pieces to all ranks.
        collective: What the state travels through.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, exchange: Slices, collective: Collective) -> None:
        self._optimizer, self._exchange, self._collective = optimizer, exchange, collective
        self._parts: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        self._taken: set[torch.nn.Parameter] = set()
        self._gathered: dict[torch.nn.Parameter, dict[str, Any]] | None = None
        self._unseen = True
        self.take_in()

    def take_in(self) -> None:
        """Divide what the exchange has that was not divided yet, with the state that there is of it."""
        for piece in self._exchange.pieces:
            if piece.parameter not in self._taken:
                self._parts[piece.parameter] = piece.part
                if whole := self._optimizer.state.get(piece.parameter):
                    self._state[piece.part] = self._cut(whole, piece)
        for parameter in self._exchange.parameters:
            if parameter not in self._taken:
                self._taken.add(parameter)
                self._optimizer.state.pop(parameter, None)
        self._gathered = None

    def update(
        self,
        step: Callable[[torch.optim.Optimizer], None],
        *,
        clip_norm: float | None,
        clip_value: float | None,
    ) -> None:
        """One step of the optimizer, after which all ranks have the same parameters."""
        self._gathered = None
        grads = [piece.part.grad for piece in self._exchange.pieces if piece.part.grad is not None]
        if clip_value is not None and grads:
            torch._foreach_clamp_min_(grads, -clip_value)
            torch._foreach_clamp_max_(grads, clip_value)
        if clip_norm is not None:
            self._clip_norm(grads, clip_norm)
        with self._on_parts():
            step(self._optimizer)
        for piece in self._exchange.pieces:
            piece.part.grad = None
        if self._unseen:
            self._refuse_shapes()
            self._unseen = False
        self._exchange.spread()

    @property
    def nbytes(self) -> int:
        """The memory of this rank's part of the optimizer's state."""
        values = (value for state in self._state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def gather(self) -> None:
        """Let the first rank know the whole state, until the next step; every rank calls it."""
        if self._gathered is not None:  # so it is on all ranks
            return
        whole: dict[torch.nn.Parameter, dict[str, Any]] = {}
        for source in range(self._collective.size):
            for told in self._told_by(source):
                for entry in told:
                    self._put_in(whole, *entry)
        for parameter, state in whole.items():
            for key, value in state.items():
                if isinstance(value, _Flat):
                    state[key] = self._exchange.shaped(value.values, parameter)
        self._gathered = whole

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the optimizer itself would tell it; on the first rank, after `gather`.

        Raises:
            ConfigError: It is not there.
        """
        if self._gathered is None or self._collective.rank != 0:
            raise ConfigError(
                "the state of the optimizer is divided between the workers, and this one does not know the"
                " whole of it here.\nHint: the first worker does at the end of each epoch, as in"
                " `if run.rank == 0: run.write_checkpoint(path)`; within an epoch run.save_checkpoint() asks"
                " for a checkpoint in model_dir."
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
        """Let the optimizer hold this rank's parts instead of whole parameters."""
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

    def _clip_norm(self, grads: list[torch.Tensor], most: float) -> None:
        """What torch's clip_grad_norm_ does, with the norm over the pieces of all ranks."""
        square = 0.0
        if grads:
            norms = torch.stack([norm.double() for norm in torch._foreach_norm(grads)])
            square = float(norms.square().sum().item())
        norm = float(np.sqrt(self._exchange.total(square)))
        factor = most / (norm + 1e-6)
        if grads and not factor >= 1.0:  # a norm that is not a number shows in the weights, as in torch
            torch._foreach_mul_(grads, factor)

    def _cut(self, whole: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        """The state of a piece, out of that of its parameter."""
        if piece.is_whole:
            return dict(whole)
        shape = piece.parameter.shape
        made = {}
        for key, value in whole.items():
            if isinstance(value, torch.Tensor) and value.shape == shape:
                value = self._exchange.flattened(value, piece.parameter)[piece.start : piece.stop].clone()
            elif isinstance(value, torch.Tensor):
                value = value.clone()
            made[key] = value
        return made

    def _told_by(self, source: int) -> Iterator[list[Any]]:
        """What one rank has, some pieces at a time; nothing where only the first rank is to know."""
        own = self._collective.rank == source
        chunks = list(self._chunks()) if own else []
        [count] = self._collective.broadcast([np.array([len(chunks)], np.int64)], source)
        for number in range(int(count[0])):
            data = dump({"pieces": chunks[number]}) if own else b""
            told = _from(self._collective, data, source)
            if self._collective.rank == 0:
                yield parse(told)["pieces"]

    def _chunks(self) -> Iterator[list[Any]]:
        self._refuse_shapes()
        numbers = {parameter: number for number, parameter in enumerate(self._exchange.parameters)}
        chunk: list[Any] = []
        size = 0
        for piece in self._exchange.pieces:
            if not (state := self._state.get(piece.part)):
                continue
            chunk.append([numbers[piece.parameter], piece.start, piece.stop, dict(state)])
            size += sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
            if size >= _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def _put_in(
        self,
        whole: dict[torch.nn.Parameter, dict[str, Any]],
        number: int,
        start: int,
        stop: int,
        state: dict[str, Any],
    ) -> None:
        parameter = self._exchange.parameters[number]
        if stop - start == parameter.numel():
            whole[parameter] = state
            return
        joined = whole.setdefault(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                if key not in joined:
                    joined[key] = _Flat(torch.empty(parameter.numel(), dtype=value.dtype))
                joined[key].values[start:stop] = value
            else:
                joined[key] = value

    def _refuse_shapes(self) -> None:
        """Complain about a state that shows that elements do not move by themselves."""
        for piece in self._exchange.pieces:
            if piece.is_whole:
                continue
            count = piece.stop - piece.start
            for key, value in self._state.get(piece.part, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != (count,):
                    raise ConfigError(
                        f"optimizer {type(self._optimizer).__name__} keeps {key!r} of shape"
                        f" {tuple(value.shape)} for a part of {count} elements of a parameter of shape"
                        f" {tuple(piece.parameter.shape)}: it does not move each element by itself.\n"
                        "Hint: sync_options={'divide': 'parameters'}."
                    )


class _Flat:
    """A tensor of a whole state that is being put together, elements in the order of the memory."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


def _from(collective: Collective, data: bytes, source: int) -> bytes:
    """One rank's bytes, on every rank."""
    [length] = collective.broadcast([np.array([len(data)], np.int64)], source)
    own = collective.rank == source
    mine = np.frombuffer(data, np.uint8) if own else np.empty(int(length[0]), np.uint8)
    [whole] = collective.broadcast([mine], source)
    return whole.tobytes() if collective.rank == 0 else b""
