"""Asynchronous training: workers step by themselves, and a parameter server applies what each of them learns.

A worker pulls weights, computes the gradient of its own rows and pushes it; the answer has the weights as
they are then. Nobody waits for another worker within an epoch. At its end the workers that are left meet,
look at the same weights, judge and save. The server is `parameter_server.py`, on ranks of the role "ps".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kindler.collective import Array, Collective
from kindler.config import RunSettings
from kindler.errors import ConfigError
from kindler.sync.contract import Replica
from kindler.sync.gather_collective import GatherCollective
from kindler.sync.server_link import ServerLink
from kindler.sync.server_wire import Op
from kindler.sync.wait_clock import Waiting


class Asynchronous:
    """The sync "async".

    Args:
        settings: Time limits, and whether workers share memory with a server on their machine.
        lock: Whether weights are read between updates only. Without (Hogwild), a worker may get weights of
            which a part has seen an update that the rest has not.
        max_staleness: The most updates between the weights that a gradient was computed with and its own
            update; workers wait where it would be more. None lets nobody wait.
        push_every: Batches whose mean gradient is one push.
        shards: How many servers share the parameters.
    """

    in_step = False
    ends_at: int | None = None

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
        self._settings = settings
        self._push_every = push_every
        self._collective: GatherCollective | None = None
        self._waiting = Waiting()
        self._links: list[ServerLink] = []
        self._owned: list[list[int]] = []
        self._sums: list[Array] = []
        self._weight, self._batches = 0.0, 0
        self._looked: list[Array] = []
        self._figures: dict[str, Any] = {}
        self._rates: list[float] = []
        self._worker: Any = None

    @property
    def collective(self) -> Collective:
        """What workers meet through between epochs."""
        assert self._collective is not None, "attach comes first"
        return self._collective

    @property
    def waited_s(self) -> float:
        """Seconds that this worker has waited for the server or for others so far."""
        return self._waiting.seconds + (self._collective.waited_s if self._collective is not None else 0.0)

    def attach(self, replica: Any, worker: Any) -> None:
        """Join the others from rank 0's state on, and connect to the servers."""
        self._worker = worker
        self._waiting = Waiting(worker)
        self._collective = GatherCollective(worker)
        replica.join(self._collective)
        arrays = replica.read()
        servers = [member.rank for member in worker.members if member.role == "ps"]
        self._owned = _shares([array.nbytes for array in arrays], len(servers))
        for server, owned in zip(servers, self._owned, strict=True):
            link = ServerLink(
                worker,
                server,
                [arrays[place] for place in owned],
                waiting=self._waiting,
                timeout_s=self._settings.sync_timeout_s,
                memory=self._settings.shared_memory,
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
        """Let the loop of a framework's own push its gradients."""
        replica.send_steps(self._learn)

    def begin_epoch(self, replica: Any) -> None:
        """Take the weights that the first step is made with."""
        if not self._worker.outlives:  # not earlier: what is opened before needs all of them
            self._worker.become_optional()
        self._send_rates(replica)
        for link in self._links:
            link.pull()
        replica.write(self._weights())

    def step(self, replica: Replica, batch: Any) -> None:
        """Push the gradient of this worker's rows, and take the weights that come back."""
        if batch.rows:
            mine = replica.gradients(batch)
            self._send_rates(replica)
            self._learn(mine.arrays, mine.weight, copied=False)
            replica.write(self._weights())
        self.stepped(replica, batch.rows)

    def stepped(self, replica: Any, rows: int) -> None:
        """After a step: updates are counted by the server."""
        replica.step = self._version

    def catch_up(self, replica: Any) -> None:
        """At the end of an epoch: push what is left, and look at the same weights as all others."""
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
        told = [link.ask(Op.EPOCH, {"epoch": replica.epoch}) for link in self._links]
        self._rates = told[0]["rates"]
        if self._rates:
            replica.set_rates(self._rates)
            self._rates = replica.rates()  # as this process rounds them
        self._figures = {
            "updates": told[0]["updates"],
            "staleness_median": float(np.median([part["staleness_median"] for part in told])),
            "staleness_max": max(part["staleness_max"] for part in told),
            "sync_bytes": sum(part["sync_bytes"] for part in told),
        }

    def figures(self) -> dict[str, Any]:
        """What the servers did in the epoch that `catch_up` ended."""
        return {**self._figures, "lost_workers": len(self._worker.lost)}

    def next_epoch(self, replica: Any, logs: Mapping[str, Any]) -> None:
        """After the callbacks of an epoch: what they did to the model goes to the server."""
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
        """What checkpoints and the result are made of: the server's state, with this worker's buffers."""
        return _RunState(replica, self._links, self._owned)

    def close(self) -> None:
        """Leave the others. Idempotent."""
        for link in self._links:
            link.close()

    def _send_rates(self, replica: Any) -> None:
        """Tell the servers of learning rates that a callback has changed: the optimizer is theirs."""
        rates = replica.rates()
        if rates != self._rates:
            for link in self._links:
                link.ask(Op.RATES, rates)
            self._rates = rates

    @property
    def _version(self) -> int:
        return min((link.version for link in self._links), default=0)

    def _weights(self) -> list[Array]:
        """The weights that came last, in their order; the next answer overwrites them."""
        found: list[Any] = [None] * sum(map(len, self._owned))
        for link, owned in zip(self._links, self._owned, strict=True):
            for place, array in zip(owned, link.weights, strict=True):
                found[place] = array
        return found

    def _learn(self, arrays: Sequence[Array], weight: float, *, copied: bool = True) -> list[Array]:
        """Push gradients, or add them to those of the next push; the weights to go on with."""
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
        """Push the mean of the batches so far."""
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
    """The state of a run as checkpoints see a replica."""

    def __init__(self, replica: Any, links: Sequence[ServerLink], owned: Sequence[Sequence[int]]) -> None:
        self._replica, self._links, self._owned = replica, links, owned
        self.epoch: int = replica.epoch
        self.step: int = replica.step

    def state(self) -> bytes:
        """What a run continues from."""
        mine, epoch = self._replica.state(), self.epoch
        states = [link.merge(mine, epoch=epoch) for link in self._links]
        return states[0] if len(states) == 1 else bytes(self._replica.join_parts(states, self._owned))

    def freeze(self) -> Callable[[], Sequence[bytes]]:
        """The state as it is now."""
        data = self.state()
        return lambda: [data]

    def local_state(self) -> bytes:
        """There are no checkpoints within an epoch."""
        return b""


def _shares(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """The places of the parameters that each server looks after: about as many bytes each.

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
        complaints.append(f"lock is True or False; received {lock!r}.")
    if max_staleness is not None and not _is_count(max_staleness, 0):
        complaints.append(f"max_staleness is a whole number from 0 on, or None; received {max_staleness!r}.")
    if not _is_count(push_every, 1):
        complaints.append(f"push_every is a whole number of at least 1; received {push_every!r}.")
    if not _is_count(shards, 1):
        complaints.append(f"shards is a whole number of at least 1; received {shards!r}.")
    if complaints:
        raise ConfigError("sync='async': " + " ".join(complaints))


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
