"""Exchanges gradients between all workers of a run while backward still runs.

Flat buckets are filled as autograd makes gradients, last layer first, and sent when full: through shared
memory within a host and a ring between hosts, by NCCL on GPUs, or over the CPU if ranks share a GPU. The
ring's connections prove themselves with the run's secret, so nothing of torch listens. NCCL and models that
call `torch.distributed` meet at a torch store, bound to the workers' address or the loopback.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed

from kindler.collective import GradientExchange
from kindler.errors import SyncError, fresh
from kindler.group import Group
from kindler.sync.ring import Ring
from kindler.sync.shared_memory import Channel, Topology, Waiting, channels

_FIRST_BUCKET_BYTES = 1 << 20  # small, so that the exchange starts early
_BUCKET_BYTES = 25 << 20
_NUMBERS = 2  # at the end of a load, for the whole step

dist: Any = torch.distributed  # its stubs leave out the classes that are used here

Wait: TypeAlias = Callable[[], None]  # until an exchange is done; with NCCL, until the stream sees that
Network: TypeAlias = "_RingNetwork | _NcclNetwork"
BucketMaker = Callable[[int, torch.dtype, Channel | None], Any]


class TorchExchange(GradientExchange):
    """One rank's routes to the others; all make the same calls and get bit-identical results.

    A missing rank is named in SyncTimeoutError (shared memory, ring) or fails the others' call with SyncError
    (NCCL), within `timeout_s`. `staged`: over the CPU, because two ranks share a GPU, which NCCL refuses.
    """

    def __init__(
        self, worker: Group, *, device: torch.device, timeout_s: float, shared_memory: bool = True
    ) -> None:
        self.rank, self.size, self.device = worker.rank, worker.size, torch.device(device)
        self.worker = worker
        self.network: Network | None = None
        self.staged = False
        self._waiting = Waiting(worker)
        if self.size == 1:
            self.where = Topology([""], 0)
            return
        if self.device.type == "cuda":
            self.staged = len(set(gpus_of(worker, self.device))) < self.size
            shared_memory = shared_memory and self.staged
        self.where = Topology.of(
            worker, timeout_s=timeout_s, waiting=self._waiting, shared_memory=shared_memory
        )
        if not self.where.one_host:
            self.network = connect(worker, self.where, torch.device("cpu") if self.staged else self.device)

    @property
    def waited_s(self) -> float:
        return self._waiting.seconds

    def bucket(self, elements: int, dtype: torch.dtype, channel: Channel | None) -> Bucket | StagedBucket:
        inner = Bucket(self, elements, dtype, channel)
        return StagedBucket(inner, self.device) if self.staged else inner

    def buckets(
        self, layouts: Sequence[tuple[int, torch.dtype]], make: BucketMaker | None = None
    ) -> list[Any]:
        """Every rank calls it."""
        made: Sequence[Channel | None] = [None] * len(layouts)
        if self.where.any_shared:
            sizes = [elements * dtype.itemsize for elements, dtype in layouts]
            made = channels(self.worker, self.where, sizes, TORCH) or made
        make = make or self.bucket
        return [make(elements, dtype, route) for (elements, dtype), route in zip(layouts, made, strict=True)]

    def close(self) -> None:
        """Idempotent."""
        if self.network is not None:
            network, self.network = self.network, None
            network.close()


def gpus_of(worker: Group, device: torch.device) -> list[bytes]:
    """Every rank calls it."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    identity = str(torch.cuda.get_device_properties(index).uuid)
    return worker.all_gather(f"{worker.host} {identity}".encode())


class Bucket:
    """A round is `begin`, filling `fill`, `launch`, `wait`; then `result` holds the sum over ranks.

    `parts` and `host_parts` limit what this rank and this host need of the sum; None is all of it.
    """

    parts: Sequence[slice] | None = None
    host_parts: Sequence[slice] | None = None

    def __init__(
        self, exchange: TorchExchange, elements: int, dtype: torch.dtype, channel: Channel | None
    ) -> None:
        self.where, self.channel, self.network = exchange.where, channel, exchange.network
        device = torch.device("cpu") if exchange.staged else exchange.device
        # Pinned where it is copied to a GPU.
        self.result = torch.zeros(elements, dtype=dtype, device=device, pin_memory=exchange.staged)
        self.fill = self.result if channel is None else channel.slots(dtype)[self.where.index][:elements]
        self._waits: list[Wait] = []

    def begin(self) -> None:
        """Wait until the other ranks of this host have read the last values of `fill`."""
        if self.channel is not None:
            self.channel.slot(self.fill.dtype)

    def stage(self) -> None:
        """It is sent from where it is."""

    def launch(self, *, staged: bool = False) -> None:
        if self.channel is not None:
            self.channel.post()
        elif self.network is not None:
            self._waits = self.start(self.network)

    def push(self, *, block: bool) -> bool:
        """Pass it to the network once the whole host has arrived; False if not yet, without `block`."""
        if self.channel is None or self.network is None or self._waits:
            return True
        if not (block or self.channel.arrived()):
            return False
        self.channel.gather_into(self.result)
        self._waits = self.start(self.network)
        return True

    def start(self, network: Network) -> list[Wait]:
        return [network.all_reduce(self.result)]

    def wait(self) -> None:
        if self.network is not None:
            self.push(block=True)
            waits, self._waits = self._waits, []
            for wait in waits:
                wait()
            if self.channel is not None:
                self.channel.publish(self.result, self.host_parts)
        elif self.channel is not None and self.where.one_host:
            self.channel.sum_into(self.result, self.parts)
        elif self.channel is not None:
            self.channel.fetch(self.result, self.parts)


class StagedBucket:
    """A bucket on a GPU whose sums are computed on the CPU."""

    def __init__(self, inner: Bucket, device: torch.device) -> None:
        self.fill = self.result = torch.zeros_like(inner.fill, device=device)
        self._sent = torch.empty_like(inner.fill, pin_memory=True)
        self._inner = inner
        self.push = inner.push

    def begin(self) -> None:
        """The buffer is private."""

    def stage(self) -> None:
        """Begin the copy to the host; it may be recorded."""
        self._sent.copy_(self.fill, non_blocking=True)

    def launch(self, *, staged: bool = False) -> None:
        if not staged:
            self.stage()
        self._inner.begin()
        torch.cuda.current_stream().synchronize()
        self._inner.fill.copy_(self._sent)
        self._inner.launch()

    def wait(self) -> None:
        self._inner.wait()
        # Done before the next `launch` returns, and so before the next sum is written.
        self.result.copy_(self._inner.result, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Filled:
    """What a recorded `fill` lays out: which parameters have a gradient, and the weight."""

    members: Sequence[bool]
    weight: float | torch.Tensor | None


@dataclass(slots=True)
class Member:
    parameter: torch.nn.Parameter
    load: Load
    place: int
    fill: torch.Tensor
    result: torch.Tensor
    filled: bool = False


class Load:
    """A bucket with its members: their gradients, one flag each (has a gradient), then two numbers.

    The numbers are 1 (0 if the rank announces parameters) and the weight; they count in one load only.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], bucket: Any) -> None:
        ends = sum(map(reals, parameters))
        self.bucket, self.flags = bucket, slice(ends, ends + len(parameters))
        self.members: list[Member] = []
        self.begun = self.launched = False
        start = 0
        for place, parameter in enumerate(parameters):
            span = slice(start, start + reals(parameter))
            # Laid out as the parameter is, which fused optimizers rely on.
            fill, result = (
                laid_out_as(parameter, flat[span].view(parameter.dtype))
                for flat in (bucket.fill, bucket.result)
            )
            self.members.append(Member(parameter, self, place, fill, result))
            start = span.stop
        self.reset()

    def begin(self) -> None:
        if not self.begun:
            self.bucket.begin()
            self.bucket.fill[self.flags.start :].fill_(1.0)
            self.begun = True

    def reset(self) -> None:
        self.begun = self.launched = False
        self.missing = len(self.members)
        for member in self.members:
            member.filled = False

    def has_gradient(self) -> list[bool]:
        """After the sum: whether any rank has a gradient."""
        if all(member.filled for member in self.members):
            return [True] * len(self.members)
        return [flag > 0 for flag in self.bucket.result[self.flags].tolist()]


class GradientSync:
    """Sums gradients over ranks; after `finish` every rank has the same ones.

    A parameter that no rank used keeps `grad` None, as in one process; ranks that did not use it while others
    did count zero. Sparse gradients become dense. Every rank constructs it with the same parameters in the
    same order, and calls `finish` or `idle` once per step. A rank that extends alone would wait forever, so
    ranks first `announce` it, at no cost to the step.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        exchange: TorchExchange,
        *,
        first_bucket_bytes: int = _FIRST_BUCKET_BYTES,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self.exchange, self._bucket_bytes = exchange, bucket_bytes
        self._hooks: list[Any] = []
        self._loads = self._made(parameters, first_bucket_bytes, weigher=True)
        self._weigher = next(load for load in self._loads if _carries_weight(load.bucket.fill.dtype))
        self._weight: float | torch.Tensor | None = None
        self._factor: float | torch.Tensor | None = None
        self._announcing = False
        self._next = 0
        self._pushed = 0
        self._paused = False
        self.before_last: Callable[[], None] | None = None  # called before a step's last bucket is sent

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For all micro-batches of a step but the last, and while a step is recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def weigh(self, weight: float | torch.Tensor) -> None:
        """Divide sums by the sum of weights; before the backward that sends, on all ranks or none."""
        self._weight = weight

    def announce(self) -> None:
        """Travels with this step's exchange."""
        self._announcing = True

    def all_announced(self) -> bool:
        """Valid after `finish`."""
        return bool(self._weigher.bucket.result[-2].item() == 0)

    def fill(self, weight: float | torch.Tensor | None) -> Filled:
        """Lay out the gradients of a paused backward, in a graph that is being recorded or now."""
        for load in self._loads:
            load.reset()  # a recording that failed has left some
            self._complete(load)
        if weight is not None:
            self._weigher.bucket.fill[-1].fill_(weight)
        for load in self._loads:
            load.bucket.stage()
        return Filled([member.filled for load in self._loads for member in load.members], weight)

    def finish(self, filled: Filled | None = None) -> None:
        """Send what backward did not, wait for the sums and put them into the parameters' `grad`.

        `filled` is what `fill` returned, now or when it was recorded.
        """
        flags = iter(() if filled is None else filled.members)
        if filled is not None:
            self._weight = filled.weight
        for load in self._loads:
            if filled is not None:
                load.begun, load.missing = True, 0
                for member in load.members:
                    member.filled = next(flags)
            elif not load.launched:
                self._complete(load)
        if self.before_last is not None:
            self.before_last()
        self._launch_complete(last=True, filled=filled is not None)
        for load in self._loads:
            load.bucket.push(block=True)
        for load in self._loads:
            load.bucket.wait()
        self._factor = self._inverse_weight()
        for load in self._loads:
            self._hand_over(load)
            load.reset()
        self._next, self._pushed, self._weight, self._announcing = 0, 0, None, False

    def extend(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """All ranks call it alike, after `finish`; this step's gradients are exchanged at once."""
        loads = self._made(parameters, self._bucket_bytes)
        for load in loads:
            self._complete(load)
            load.bucket.launch()
        for load in loads:
            load.bucket.wait()
            self._hand_over(load)
            load.reset()
        self._loads += loads

    def idle(self, *, weighted: bool = False) -> None:
        """Take part without rows; `weighted` if the others `weigh`."""
        if weighted:
            self.weigh(0.0)
        self.finish()

    def _bucket(self, elements: int, dtype: torch.dtype, channel: Channel | None) -> Any:
        return self.exchange.bucket(elements, dtype, channel)

    def _made(
        self, parameters: Iterable[torch.nn.Parameter], first_bytes: int, *, weigher: bool = False
    ) -> list[Load]:
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        plan = _plan(wanted, first_bytes, self._bucket_bytes)
        # Complex numbers travel as pairs of real ones.
        layouts = [(sum(map(reals, p)) + len(p) + _NUMBERS, p[0].dtype.to_real()) for p in plan]
        if weigher and not any(_carries_weight(dtype) for _, dtype in layouts):
            plan.append([])
            layouts.append((_NUMBERS, torch.float32))
        buckets = self.exchange.buckets(layouts, self._bucket)
        loads = [Load(part, bucket) for part, bucket in zip(plan, buckets, strict=True)]
        for load in loads:
            for member in load.members:
                parameter: Any = member.parameter
                hook = parameter.register_post_accumulate_grad_hook(partial(self._ready, member))
                self._hooks.append(hook)
        return loads

    def _ready(self, member: Member, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if self._paused or grad is None:
            return
        load = member.load
        if load.launched:
            raise SyncError(
                f"a parameter of shape {tuple(parameter.shape)} received a second gradient in one step, "
                f"after the"
                " first had been sent.\nHint: run one backward per step; accumulation_steps splits it into "
                "several."
            )
        load.begin()
        self._put(member, grad)
        parameter.grad = None  # the sum comes instead; its memory serves the next gradient
        if load.missing == 0:
            self._launch_complete()

    def _put(self, member: Member, grad: torch.Tensor) -> None:
        if grad.is_sparse:
            grad = grad.to_dense()
        if member.filled:  # reentrant checkpoints reach a parameter twice
            member.fill.add_(grad)
            return
        member.fill.copy_(grad)
        member.filled = True
        member.load.missing -= 1

    def _complete(self, load: Load) -> None:
        """Fills gaps with gradients of earlier micro-batches, or zeros."""
        load.begin()
        for member in load.members:
            if member.filled:
                continue
            if (grad := member.parameter.grad) is not None:
                self._put(member, grad)
                continue
            member.fill.zero_()
            load.bucket.fill[load.flags.start + member.place].fill_(0.0)
        load.missing = 0

    def _launch_complete(self, *, last: bool = False, filled: bool = False) -> None:
        """Launch in the same order on all ranks, whatever the order in which backward ends."""
        end = len(self._loads) - (self.before_last is not None and not last)
        while self._next < end and self._loads[self._next].missing == 0:
            load = self._loads[self._next]
            load.begin()
            if load is self._weigher and self._weight is not None and not filled:
                load.bucket.fill[-1].fill_(self._weight)
            if load is self._weigher and self._announcing:
                load.bucket.fill[-2].fill_(0.0)
            load.bucket.launch(staged=filled)
            load.launched = True
            self._next += 1
        # In order as well: the leaders of two hosts must send the same bucket first.
        while self._pushed < self._next and self._loads[self._pushed].bucket.push(block=False):
            self._pushed += 1

    def _inverse_weight(self) -> float | torch.Tensor | None:
        """0 if nothing has weight, so that all gradients stay zero."""
        if self._weight is None:
            return None
        total = self._weigher.bucket.result[-1].clone()
        if total.is_cuda:
            return torch.where(total == 0, total, total.reciprocal())
        weight = total.item()
        return None if weight == 1.0 else 1.0 / weight if weight else 0.0

    def _hand_over(self, load: Load) -> None:
        if self._factor is not None:
            load.bucket.result[: load.flags.start].mul_(self._factor)
        for member, has_gradient in zip(load.members, load.has_gradient(), strict=True):
            member.parameter.grad = member.result if has_gradient else None


def _plan(
    parameters: Sequence[torch.nn.Parameter], first_bytes: int, other_bytes: int
) -> list[list[torch.nn.Parameter]]:
    """One dtype per bucket, in the order in which backward makes gradients."""
    plan: list[list[torch.nn.Parameter]] = []
    open_parts: dict[torch.dtype, tuple[list[torch.nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        part, used = open_parts.get(parameter.dtype, ([], 0))
        if not part:
            plan.append(part)
        part.append(parameter)
        used += parameter.numel() * parameter.element_size()
        full = used >= (first_bytes if part is plan[0] else other_bytes)
        open_parts[parameter.dtype] = ([], 0) if full else (part, used)
    return plan


def reals(parameter: torch.Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def laid_out_as(like: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A view of a flat tensor with the memory order of `like`."""
    strides = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    return flat.as_strided(like.shape, strides)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def _carries_weight(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64)


class _TorchArrays:
    def view(self, mapping: mmap.mmap, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        whole = nbytes // dtype.itemsize * dtype.itemsize
        return torch.frombuffer(mapping, dtype=torch.uint8)[offset : offset + whole].view(dtype)

    def count(self, array: torch.Tensor) -> int:
        return array.numel()

    def add_up(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(source)

    def empty(self, count: int, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(count, dtype=like.dtype)

    def raw(self, array: torch.Tensor) -> memoryview:
        return memoryview(array.detach().view(torch.uint8).numpy().data)


TORCH = _TorchArrays()


def connect(worker: Group, where: Topology, device: torch.device) -> Network | None:
    """Join the first ranks of all hosts; None for other ranks. Every rank calls it."""
    if device.type == "cuda":
        return _NcclNetwork(worker, where)
    ring = Ring.join(worker, where, TORCH)
    return None if ring is None else _RingNetwork(ring, where.waiting)


class _RingNetwork:
    """Members make the same calls in the same order; `bounds` are where their parts begin and end.

    A call starts a sum, in place, or sends parts to all; a member gets only its part of `reduce_scatter`.
    """

    def __init__(self, ring: Ring, waiting: Waiting) -> None:
        self._ring = ring
        ring.waiting = Waiting()  # of the thread: this rank waits only where it asks for a result
        self._waiting = waiting
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._serve, name="kindler-ring", daemon=True
        )
        self._thread.start()

    def all_reduce(self, flat: torch.Tensor) -> Wait:
        return self._started(lambda: self._ring.all_reduce(flat))

    def reduce_scatter(self, flat: torch.Tensor, bounds: Sequence[int]) -> Wait:
        return self._started(lambda: self._ring.reduce_scatter(flat, bounds))

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> Wait:
        return self._started(lambda: self._ring.all_gather(flat, bounds))

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ring.close()  # a call under way fails now
            self._calls.put(None)
            thread.join()

    def _started(self, call: Callable[[], None]) -> Wait:
        future: Future[None] = Future()
        self._calls.put((call, future))

        def wait() -> None:
            if not future.done():
                with self._waiting:
                    future.exception()  # every hop of the ring has a limit of its own
            if (error := future.exception()) is not None:
                raise fresh(error, traces=True)

        return wait

    def _serve(self) -> None:
        broken: BaseException | None = None  # after a failure members no longer agree on what comes next
        while (started := self._calls.get()) is not None:
            call, future = started
            try:
                if broken is not None:
                    raise fresh(broken, traces=True)
                call()
                future.set_result(None)
            except BaseException as exc:  # noqa: BLE001 - raised again where it is waited for
                broken = exc
                future.set_exception(exc)


class _NcclNetwork:
    """A private process group: torch's default one stays free for the user."""

    def __init__(self, worker: Group, where: Topology) -> None:
        self._waiting, self._rank = where.waiting, worker.rank
        store, host, port = _store(worker, where.timeout_s)
        with _backend_errors(f"meeting at {host}:{port}"):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=where.timeout_s)
            self._group: Any = dist.ProcessGroupNCCL(store, worker.rank, worker.size, options)

    def all_reduce(self, flat: torch.Tensor) -> Wait:
        return self._started("sum of gradients", lambda: self._group.allreduce([flat]))

    def reduce_scatter(self, flat: torch.Tensor, bounds: Sequence[int]) -> Wait:
        parts = _cut(flat, bounds)
        own = parts[self._rank]
        return self._started("sum of gradients", lambda: self._group.reduce_scatter([own], [parts]))

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> Wait:
        parts = _cut(flat, bounds)
        own = parts[self._rank]
        return self._started("exchange of slices", lambda: self._group.allgather([parts], [own]))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and hasattr(group, "shutdown"):
            group.shutdown()

    def _started(self, doing: str, start: Callable[[], Any]) -> Wait:
        with _backend_errors(doing):
            work = start()

        def wait() -> None:
            with _backend_errors(doing), self._waiting:
                work.wait()

        return wait


def _cut(flat: torch.Tensor, bounds: Sequence[int]) -> list[torch.Tensor]:
    return [flat[start:stop] for start, stop in pairwise(bounds)]


@contextmanager
def process_group(worker: Group, *, shared_gpus: bool, timeout_s: float) -> Iterator[None]:
    """NCCL if each worker has its own GPU, otherwise gloo; `timeout_s` also limits each operation."""
    store, host, port = _store(worker, timeout_s)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    nccl = torch.cuda.is_available() and dist.is_nccl_available() and not shared_gpus
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=store,
        rank=worker.rank,
        world_size=worker.size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(worker: Group, timeout_s: float) -> tuple[Any, str, int]:
    """Served by the first worker; every worker calls it."""
    listener: socket.socket | None = None
    if worker.rank == 0:
        with _backend_errors("opening the meeting point"):
            family = socket.AF_INET6 if ":" in worker.address else socket.AF_INET
            listener = socket.create_server((worker.address, 0), family=family)
    port = 0 if listener is None else listener.getsockname()[1]
    host, port = json.loads(worker.from_first(json.dumps([worker.address, port]).encode()))
    with _backend_errors(f"meeting at {host}:{port}"):
        store = bound_store(host, port, timedelta(seconds=timeout_s), listener)
        return dist.PrefixStore(f"kindler/{worker.run_id}", store), host, port


def bound_store(host: str, port: int, timeout: timedelta, listener: socket.socket | None) -> Any:
    """Served by whoever has the listener; torch itself would listen on every address."""
    if listener is None:
        return dist.TCPStore(host, port, None, False, timeout)
    return dist.TCPStore(
        host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


@contextmanager
def _backend_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError) as exc:
        if isinstance(exc, SyncError):
            raise
        raise SyncError(
            f"{doing} between workers failed: {exc}\n"
            "Hint: most often another worker is gone; its log says why. If the network was too slow,"
            " raise RunSettings(sync_timeout_s=...)."
        ) from exc
