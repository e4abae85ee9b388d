"""The job's large buffers on their way from the driver to every worker, along a tree of supervisors.

The driver sends them once, to the first supervisor. Each one passes every part on as it comes, to its own
worker and to two other supervisors, and keeps nothing: what the driver sends does not grow with the number of
workers, and no supervisor holds a model's state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kindler.engine.channel import Address, Channel, ChannelClosed, connect
from kindler.engine.listener import listen
from kindler.engine.peer_sockets import answer
from kindler.errors import SyncError, SyncTimeoutError

_FANOUT = 2
_TURN_S = 1.0


def parent_of(rank: int) -> int | None:
    """From whom `rank` gets the buffers; None for the first, which gets them from the hub."""
    return None if rank == 0 else (rank - 1) // _FANOUT


def children_of(rank: int, size: int) -> list[int]:
    """To whom `rank` passes them on."""
    first = rank * _FANOUT + 1
    return [child for child in range(first, first + _FANOUT) if child < size]


class Carrier:
    """One supervisor's place in the tree.

    Args:
        rank: Its rank.
        size: How many there are.
        secret: What members of the run prove themselves with.
        host: The address on which others reach this machine.
        ports: Which ports may be taken; None is any.
    """

    def __init__(
        self, rank: int, size: int, secret: bytes, *, host: str, ports: tuple[int, int] | None = None
    ) -> None:
        self._rank = rank
        self._size = size
        self._secret = secret
        self._children = children_of(rank, size)
        self._listener = (
            listen(host, backlog=len(self._children) + 16, ports=ports) if self._children else None
        )

    @property
    def address(self) -> Address | None:
        """Where those that this rank passes on to fetch the buffers."""
        if self._listener is None:
            return None
        host, port = self._listener.getsockname()[:2]
        return (host, port)

    def deliver(
        self, source: Address, worker: Channel, *, check: Callable[[], None], timeout_s: float
    ) -> None:
        """Fetch the buffers from `source` and pass them on, to the worker process and to other supervisors.

        Args:
            source: The parent's address, or the hub's.
            worker: Gets the frame "cargo" with all buffers.
            check: Called about every second; raises when the run is over.
            timeout_s: The longest silence.

        Raises:
            SyncError: They did not come, or could not be passed on.
        """
        with ExitStack() as stack:
            onward: Sequence[Channel] = self._met(check, timeout_s)
            for channel in onward:
                stack.callback(channel.close)
            try:
                up = connect(source, self._secret, timeout_s=timeout_s)
                stack.callback(up.close)
                up.send("fetch", rank=self._rank)
                self._pass_on(up, [worker, *onward], check, timeout_s)
            except ChannelClosed as exc:
                check()
                raise SyncError(
                    f"the job's data did not reach worker {self._rank}: {exc}.\n"
                    "Hint: the machines of a run must reach each other; most often another worker is gone,"
                    " and its log says why."
                ) from exc

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()

    def _met(self, check: Callable[[], None], timeout_s: float) -> list[Channel]:
        if self._listener is None:
            return []
        met = answer(
            self._listener,
            self._secret,
            set(self._children),
            deadline=time.monotonic() + timeout_s,
            missing=lambda ranks: SyncTimeoutError(
                op="handing out the job", missing=ranks, size=self._size, waited_s=timeout_s
            ),
            check=check,
        )
        return list(met.values())

    def _pass_on(
        self, up: Channel, onward: Sequence[Channel], check: Callable[[], None], timeout_s: float
    ) -> None:
        heard = time.monotonic()
        while True:
            check()
            try:
                frame = up.receive(_TURN_S, whole=False)
            except TimeoutError:
                if time.monotonic() - heard > timeout_s:
                    raise ChannelClosed(f"nothing came for {timeout_s:g} s") from None
                continue
            heard = time.monotonic()
            for channel in onward:
                channel.pass_on(frame)
            if frame.kind == "cargo":
                return
