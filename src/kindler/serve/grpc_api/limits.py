"""What the calls of one client may take of the server, so that the calls of others find room.

grpcio reads HTTP/2 and bounds a single message; it does not count what all calls hold together.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kindler.serve.http_errors import Problem
from kindler.serve.memory import resident_bytes

_LOOK_S = 0.1  # between two looks at messages on their way


class Shares:
    """Something of which there is only so much (`most`), and one client may have only a `share`.

    The first thing that a client asks for is never refused.
    """

    def __init__(self, most: int, share: int, what: str) -> None:
        self._most = most
        self._share = share
        self._what = what
        self._taken: Counter[Hashable] = Counter()
        self._total = 0

    def take(self, client: Hashable, amount: int = 1) -> Callable[[], None]:
        """Take some; what is returned gives it back."""
        own, total = self._taken[client], self._total
        if own and (own + amount > self._share or total + amount > self._most):
            raise Problem(
                503,
                f"the server is busy with {total} {self._what}, {own} from this client.",
                {"retry-after": "1"},
            )
        self._taken[client] += amount
        self._total += amount

        def give_back() -> None:
            self._taken[client] -= amount
            self._total -= amount
            if not self._taken[client]:
                del self._taken[client]

        return give_back


@dataclass(eq=False, slots=True)
class Upload:
    """A call whose message is on its way: who sends it, and what ends the call and says why.

    It must be there at `until`; None is for a stream, which may wait between two messages.
    """

    client: Hashable
    end: Callable[[Problem], None]
    until: float | None


class Uploads:
    """Messages that were not there at once.

    How much of them has arrived is known to grpcio alone. What the process has grown by since the first of
    them is what they hold at most, and when that is too much, the client with most of them loses them.
    """

    def __init__(
        self, most_bytes: int, elsewhere: Callable[[], int], size: Callable[[], int] | None = None
    ) -> None:
        self._most_bytes = most_bytes
        self._elsewhere = elsewhere
        self._size = size or resident_bytes
        self._waiting: dict[Upload, None] = {}
        self._before = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, upload: Upload) -> None:
        if not self._waiting:
            self._before = self._size() - self._elsewhere()
        self._waiting[upload] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def remove(self, upload: Upload) -> None:
        self._waiting.pop(upload, None)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        for upload in [one for one in self._waiting if one.until is not None and one.until < now]:
            self._end(upload, Problem(408, "the message did not arrive in time."))
        held = self._size() - self._elsewhere() - self._before
        if held > self._most_bytes:
            busy = Problem(503, f"the server is busy with {held} bytes of messages.", {"retry-after": "1"})
            timed = [upload for upload in self._waiting if upload.until is not None] or list(self._waiting)
            for client, _ in Counter(upload.client for upload in timed).most_common(1):
                for upload in [one for one in timed if one.client == client]:
                    self._end(upload, busy)
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _end(self, upload: Upload, problem: Problem) -> None:
        del self._waiting[upload]
        upload.end(problem)
