"""Notices that a process or its machine will be taken away: SIGTERM, and the file or URL of a cloud's agent.

What a notice means for the run is decided by the hub.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import ProxyHandler, Request, build_opener

from kindler import limits

SIGTERM = "SIGTERM"  # the reason that is told where there is no other

# Each cloud ignores the headers of the others, and answers nothing without its own.
_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
_TOKEN = "X-aws-ec2-metadata-token"  # what AWS wants since version 2 of its metadata service
_ENDS = ("Preempt", "Terminate")  # of Azure's events, those that end a machine
_MOST_BYTES = 64 << 10


@contextmanager
def on_sigterm(call: Callable[[], None]) -> Iterator[None]:
    """Make SIGTERM call `call` while the block runs, on the main thread.

    On other threads, and where the signal is ignored, nothing changes. A fork of this process that gets it
    does what it would have done without this.
    """
    before = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before in (None, signal.SIG_IGN):
        yield
        return
    owner = os.getpid()

    def handle(number: int, frame: object) -> None:
        if os.getpid() == owner:
            call()
        else:
            signal.signal(number, before)
            signal.raise_signal(number)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt while the block runs; afterwards it does what it always does."""
    received = False

    def interrupt() -> None:
        nonlocal received
        received = True
        raise KeyboardInterrupt(SIGTERM)

    try:
        with on_sigterm(interrupt):
            yield
    finally:
        if received:
            signal.raise_signal(signal.SIGTERM)


@contextmanager
def telling(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` on a thread for each SIGTERM: its handler may interrupt who has the locks of `tell`."""
    received: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def pass_on() -> None:
        while received.get():
            tell()

    threading.Thread(target=pass_on, name="kindler-sigterm", daemon=True).start()
    try:
        with on_sigterm(lambda: received.put(True)):
            yield
    finally:
        received.put(False)


class NoticeSource:
    """The file or URL in which the notice to a machine appears."""

    def __init__(self, place: str | PathLike[str]) -> None:
        self._place = os.fspath(place)
        self._opener = build_opener(ProxyHandler({}))  # the metadata of a machine is beside it

    def has_notice(self) -> bool:
        """Raises OSError if the URL cannot be reached."""
        return is_notice(self._fetched({})) if "://" in self._place else Path(self._place).exists()

    def _fetched(self, headers: dict[str, str]) -> str:
        request = Request(self._place, headers={**_HEADERS, **headers})
        try:
            return self._read(request)
        except HTTPError as error:
            error.close()
            if error.code == 401 and not headers:
                return self._fetched({_TOKEN: self._token()})
            return ""

    def _token(self) -> str:
        url = urljoin(self._place, "/latest/api/token")
        return self._read(Request(url, headers={f"{_TOKEN}-ttl-seconds": "60"}, method="PUT"))

    def _read(self, request: Request) -> str:
        with self._opener.open(request, timeout=limits.NOTICE_ANSWER_S) as answer:
            return str(answer.read(_MOST_BYTES).decode(errors="replace")).strip()


def is_notice(answer: str) -> bool:
    """Whether the answer of a metadata service is a notice.

    >>> is_notice('{"action": "terminate", "time": "2030-01-01T00:00:00Z"}')  # AWS
    True
    >>> is_notice("FALSE")  # Google Cloud
    False
    >>> is_notice('{"DocumentIncarnation": 1, "Events": [{"EventType": "Freeze"}]}')  # Azure
    False
    """
    if not answer or answer.upper() in ("FALSE", "NONE"):
        return False
    try:
        said: Any = json.loads(answer)
    except ValueError:
        return True
    if isinstance(said, dict) and "Events" in said:
        return any(event.get("EventType") in _ENDS for event in said["Events"])
    return True
