"""Asynchronous training: workers step independently, and a parameter server applies their gradients.

Each push of gradients is answered with the current weights. No worker waits for another within an epoch; at
its end the remaining workers meet, look at the same weights, evaluate and save. The server is
`parameter_server.py`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kindler.collective import Array, Collective
from kindler.config import RunSettings
from kindler.errors import ConfigError, SyncError, SyncTimeoutError
from kindler.group import Group
from kindler.sync.contract import Sync
from kindler.sync.host_group import FlatLayout, GatherCollective
from kindler.sync.parameter_server import (
    Header,
    Op,
    ProtocolError,
    read_header,
    read_into,
    read_json,
    read_payload,
    send,
    send_json,
)
from kindler.sync.shared_memory import Segment, Waiting


class Asynchronous(Sync):
    in_step = False
    _worker: Group

    def __init__(
        self,
        settings: RunSettings,
        *,
        lock: bool = False,
        max_staleness: int | None = None,
        push_every: int = 1,
        shards: int = 1,
    ) -> None:
        _check(lock=lock, max_staleness=max_staleness, push_every=push_every, shards=shards)
        super().__init__(settings)
        self._push_every = push_every
        self._waiting = Waiting()
        self._links: list[ServerLink] = []
        self._owned: list[list[int]] = []
        self._sums: list[Array] = []
        self._weight, self._batches = 0.0, 0
        self._looked: list[Array] = []
        self._figures: dict[str, Any] = {}
        self._rates: list[float] = []

    def connect(self, worker: Group) -> Collective:
        return GatherCollective(worker)

    @property
    def waited_s(self) -> float:
        return self._waiting.seconds + (self._collective.waited_s if self._collective is not None else 0.0)

    def attach(self, replica: Any, worker: Group) -> None:
        super().attach(replica, worker)
        self._worker = worker
        self._waiting = Waiting(worker)
        arrays = replica.read()
        servers = [member.rank for member in worker.members if member.role == "ps"]
        self._owned = _shares([array.nbytes for array in arrays], len(servers))
        for server, owned in zip(servers, self._owned, strict=True):
            link = ServerLink(
                worker,
                server,
                [arrays[place] for place in owned],
                waiting=self._waiting,
                timeout_s=self.settings.sync_timeout_s,
                memory=self.settings.shared_memory,
                ends_at=self.ends_at,
                owned=owned if len(servers) > 1 else None,
            )
            self._links.append(link)
        self._rates = replica.rates()
        if worker.rank == 0:
            state = replica.state()
            for link in self._links:
                link.start_from(state)

    def share_steps(self, replica: Any) -> None:
        replica.send_steps(self._learn)

    def begin_epoch(self, replica: Any) -> None:
        if not self._worker.outlives:  # not earlier: what is opened before needs all of them
            self._worker.become_optional()
        self._send_rates(replica)
        for link in self._links:
            link.pull()
        replica.write(self._weights())

    def step(self, replica: Any, batch: Any) -> None:
        if batch.rows:
            mine = replica.gradients(batch)
            self._send_rates(replica)
            self._learn(mine.arrays, mine.weight, copied=False)
            replica.write(self._weights())
        self.stepped(replica, batch.rows)

    def stepped(self, replica: Any, rows: int) -> None:
        replica.step = self._version

    def catch_up(self, replica: Any) -> None:
        if self._batches:
            self._push()
        for link in self._links:
            link.release()
        self.collective.barrier()
        for link in self._links:
            link.look()
        replica.write(self._weights())
        self._looked = [array.copy() for array in self._weights()]
        replica.step = self._version
        figures = [link.ask(Op.EPOCH, {"epoch": replica.epoch}) for link in self._links]
        self._rates = figures[0]["rates"]
        if self._rates:
            replica.set_rates(self._rates)
            self._rates = replica.rates()  # as this process rounds them
        self._figures = {
            "updates": figures[0]["updates"],
            "staleness_median": float(np.median([part["staleness_median"] for part in figures])),
            "staleness_max": max(part["staleness_max"] for part in figures),
            "sync_bytes": sum(part["sync_bytes"] for part in figures),
        }

    def figures(self) -> dict[str, Any]:
        return {**self._figures, "lost_workers": len(self._worker.lost)}

    def next_epoch(self, replica: Any, logs: Mapping[str, Any]) -> None:
        for link in self._links:
            self._rates = link.ask(Op.ENDED_EPOCH, {"epoch": replica.epoch, "logs": dict(logs)})["rates"]
        self._send_rates(replica)
        arrays = replica.read()
        changed = any(not np.array_equal(a, b) for a, b in zip(arrays, self._looked, strict=True))
        if changed and self._worker.leads:
            for link, owned in zip(self._links, self._owned, strict=True):
                link.write([arrays[place] for place in owned])
        self.collective.barrier()

    def whole(self, replica: Any) -> Any:
        return _RunState(replica, self._links, self._owned)

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _send_rates(self, replica: Any) -> None:
        """Send learning rates that a callback changed: the optimizer is the servers'."""
        rates = replica.rates()
        if rates != self._rates:
            for link in self._links:
                link.ask(Op.RATES, rates)
            self._rates = rates

    @property
    def _version(self) -> int:
        return min((link.version for link in self._links), default=0)

    def _weights(self) -> list[Array]:
        """The latest weights in order; the next answer overwrites them."""
        weights: list[Any] = [None] * sum(map(len, self._owned))
        for link, owned in zip(self._links, self._owned, strict=True):
            for place, array in zip(owned, link.weights, strict=True):
                weights[place] = array
        return weights

    def _learn(self, arrays: Sequence[Array], weight: float, *, copied: bool = True) -> list[Array]:
        """Push gradients, or add them to the next push; return the weights to continue with."""
        if weight:
            if self._push_every == 1:
                self._fill(arrays)
                self._send()
            else:
                self._add(arrays, weight)
                if self._batches == self._push_every:
                    self._push()
        return [array.copy() for array in self._weights()] if copied else []

    def _add(self, arrays: Sequence[Array], weight: float) -> None:
        if not self._batches:
            self._sums = [array * array.dtype.type(weight) for array in arrays]
        else:
            for total, array in zip(self._sums, arrays, strict=True):
                total += array * array.dtype.type(weight)
        self._weight += weight
        self._batches += 1

    def _push(self) -> None:
        self._fill([total / total.dtype.type(self._weight) for total in self._sums])
        self._weight, self._batches = 0.0, 0
        self._send()

    def _fill(self, arrays: Sequence[Array]) -> None:
        for link, owned in zip(self._links, self._owned, strict=True):
            for place, view in zip(owned, link.gradients, strict=True):
                np.copyto(view, arrays[place])

    def _send(self) -> None:
        for link in self._links:
            link.push()
        for link in self._links:
            link.receive()


class _RunState:
    def __init__(self, replica: Any, links: Sequence[ServerLink], owned: Sequence[Sequence[int]]) -> None:
        self._replica, self._links, self._owned = replica, links, owned
        self.epoch: int = replica.epoch
        self.step: int = replica.step

    def state(self) -> bytes:
        mine, epoch = self._replica.state(), self.epoch
        states = [link.merge(mine, epoch=epoch) for link in self._links]
        return states[0] if len(states) == 1 else bytes(self._replica.join_parts(states, self._owned))

    def freeze(self) -> Callable[[], Sequence[bytes]]:
        data = self.state()
        return lambda: [data]

    def local_state(self) -> bytes:
        """There are no checkpoints within an epoch."""
        return b""


def _shares(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """The parameters that each server owns, about equal in bytes.

    >>> _shares([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    loads, shares = [0] * servers, [list[int]() for _ in range(servers)]
    for place in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        least = loads.index(min(loads))
        loads[least] += sizes[place]
        shares[least].append(place)
    return [sorted(share) for share in shares]


def _check(*, lock: Any, max_staleness: Any, push_every: Any, shards: Any) -> None:
    complaints = []
    if not isinstance(lock, bool):
        complaints.append(f"lock must be True or False; received {lock!r}.")
    if max_staleness is not None and not _is_count(max_staleness, 0):
        complaints.append(
            f"max_staleness must be a whole number, 0 or more, or None; received {max_staleness!r}."
        )
    if not _is_count(push_every, 1):
        complaints.append(f"push_every must be a whole number of at least 1; received {push_every!r}.")
    if not _is_count(shards, 1):
        complaints.append(f"shards must be a whole number of at least 1; received {shards!r}.")
    if complaints:
        raise ConfigError("strategy='async': " + " ".join(complaints))


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class ServerLink:
    """One worker's connection to a server.

    Put gradients into `gradients` before `push`; `pull`, `push` and `look` overwrite `weights`, which have
    seen `version` updates. `owned` are the places of `arrays` among all parameters, None if they are all.
    """

    def __init__(
        self,
        worker: Group,
        server: int,
        arrays: Sequence[Array],
        *,
        waiting: Waiting,
        timeout_s: float,
        memory: bool,
        ends_at: int | None,
        owned: Sequence[int] | None,
    ) -> None:
        self._worker, self._server, self._waiting, self._timeout_s = worker, server, waiting, timeout_s
        layout = FlatLayout(arrays)
        self._sock: socket.socket = worker.call(server, timeout_s)
        nbytes = layout.nbytes
        self._segment: Segment | None = None
        near = memory and nbytes > 0 and worker.members[server].host == worker.host
        segment = _shared(worker, 2 * nbytes) if near else None
        try:
            hello = {
                "ends_at": ends_at,
                "owned": None if owned is None else list(owned),
                "memory": None if segment is None else segment.path,
                "nbytes": 2 * nbytes,
            }
            with self._talking("greeting"):
                send_json(self._sock, Op.HELLO, hello)
                mapped = read_json(self._sock, read_header(self._sock))["memory"]
        finally:
            if segment is not None:
                segment.unlink()
        if mapped and segment is not None:
            self._segment = segment
            whole = np.frombuffer(segment.mapping, np.uint8)
        else:
            whole = np.empty(2 * nbytes, np.uint8)
        self._outgoing, self._incoming = whole[:nbytes], whole[nbytes:]
        self.gradients, self.weights = layout.views(self._outgoing), layout.views(self._incoming)
        self.version = 0

    def start_from(self, state: bytes) -> None:
        with self._talking("sending the first state"):
            send(self._sock, Op.STATE, state)
            read_header(self._sock)

    def pull(self) -> None:
        with self._talking("pulling weights"):
            send(self._sock, Op.PULL)
            self._take_weights()

    def look(self) -> None:
        """Fetch weights without owing gradients for them, unlike `pull`."""
        with self._talking("pulling weights"):
            send(self._sock, Op.LOOK)
            self._take_weights()

    def push(self) -> None:
        """Send `gradients`, which were computed with `version`; `receive` takes the answer."""
        with self._talking("pushing gradients"):
            shared = self._segment is not None
            send(self._sock, Op.PUSH, self._outgoing, version=self.version, shared=shared)

    def receive(self) -> bool:
        with self._talking("pushing gradients"):
            return self._take_weights().op == Op.OK

    def release(self) -> None:
        """Promise no gradients for the weights that were pulled last."""
        with self._talking("ending an epoch"):
            send(self._sock, Op.RELEASE)

    def write(self, arrays: Sequence[Array]) -> None:
        for view, array in zip(self.gradients, arrays, strict=True):
            np.copyto(view, array)
        with self._talking("writing weights"):
            send(self._sock, Op.WRITE, self._outgoing, shared=self._segment is not None)
            read_header(self._sock)

    def ask(self, op: Op, value: Any) -> Any:
        with self._talking("asking the server"):
            send_json(self._sock, op, value)
            header = read_header(self._sock)
            return read_json(self._sock, header) if header.nbytes else None

    def merge(self, state: bytes, *, epoch: int) -> bytes:
        with self._talking("fetching the state"):
            send(self._sock, Op.MERGE, state, version=epoch)
            return bytes(read_payload(self._sock, read_header(self._sock)))

    def close(self) -> None:
        self._sock.close()

    def _take_weights(self) -> Header:
        header = read_header(self._sock)
        if header.nbytes != self._incoming.nbytes:
            raise ProtocolError(
                f"{header.nbytes:,} bytes of weights came instead of {self._incoming.nbytes:,}"
            )
        if not header.shared:
            read_into(self._sock, self._incoming.data)
        self.version = header.version
        return header

    @contextmanager
    def _talking(self, doing: str) -> Iterator[None]:
        rank = self._worker.rank
        try:
            with self._waiting:
                yield
        except TimeoutError:
            raise SyncTimeoutError(
                op=f"{doing} (worker {rank})",
                missing=[self._server],
                size=self._worker.size,
                waited_s=self._timeout_s,
            ) from None
        except (OSError, ProtocolError) as exc:
            raise SyncError(f"worker {rank} lost the parameter server while {doing}: {exc}") from exc


def _shared(worker: Group, nbytes: int) -> Segment | None:
    try:
        return Segment.create([Path("/dev/shm")], f"kindler-{worker.run_id}", nbytes)
    except SyncError:
        return None
