"""A server where nodes register, and a client of it, with TensorFlowOnSpark's names.

Clusters of Kindler meet elsewhere, and with a secret. This is for programs that use it themselves: messages
are JSON (TensorFlowOnSpark unpickles what it receives), and anyone who reaches the port can register.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kindler.compat.tensorflowonspark import util
from kindler.errors import ConfigError, StartTimeoutError, TrainingError

_HOST, _PORT = "TFOS_SERVER_HOST", "TFOS_SERVER_PORT"
_MOST_BYTES = 1 << 20  # of a message
_CONNECT_S = 30.0
_LOOK_S = 0.2

Reservation = dict[str, Any]


class Reservations:
    def __init__(self, required: int, primary_keys: Sequence[str] = ()) -> None:
        self.required = required
        self._keys = tuple(primary_keys)
        self._all: list[Reservation] = []
        self._changed = threading.Condition()

    def add(self, meta: Mapping[str, Any]) -> None:
        with self._changed:
            self._all.append(dict(meta))
            self._changed.notify_all()

    def upsert(self, meta: Mapping[str, Any]) -> None:
        with self._changed:
            place = [meta.get(key) for key in self._keys]
            same = [known for known in self._all if [known.get(key) for key in self._keys] == place]
            if not self._keys or not same:
                self._all.append(dict(meta))
            else:
                same[0].update(meta)
            self._changed.notify_all()

    def done(self) -> bool:
        return self.remaining() <= 0

    def remaining(self) -> int:
        with self._changed:
            return self.required - len(self._all)

    def get(self) -> list[Reservation]:
        with self._changed:
            return [dict(known) for known in self._all]

    def wait(self, timeout_s: float) -> bool:
        """Wait for a change, so long at most; whether there are enough then."""
        with self._changed:
            if len(self._all) < self.required:
                self._changed.wait(timeout_s)
            return len(self._all) >= self.required


class Server:
    """Where so many nodes register, which `primary_keys` tell apart; `done` once a client stopped it."""

    def __init__(self, count: int, primary_keys: Sequence[str] = ()) -> None:
        if count < 1:
            raise ConfigError(f"count={count}: must be 1 or more.")
        self.done = False
        self.reservations = Reservations(count, primary_keys)
        self._listener: socket.socket | None = None

    def start(self) -> tuple[str, int]:
        """Listen, on a thread of its own; where clients reach it."""
        listener = self.start_listening_socket()
        threading.Thread(target=self._serve, args=(listener,), name="reservations", daemon=True).start()
        return self.get_server_ip(), int(listener.getsockname()[1])

    def get_server_ip(self) -> str:
        """Its address: $TFOS_SERVER_HOST, or that of this machine."""
        return os.environ.get(_HOST) or util.get_ip_address()

    def get_server_ports(self) -> list[int]:
        """The ports that it may take: $TFOS_SERVER_PORT, as "9999" or "9997-9999", or any."""
        first, _, last = os.environ.get(_PORT, "0").partition("-")
        return list(range(int(first), int(last or first) + 1))

    def start_listening_socket(self) -> socket.socket:
        place = "" if os.environ.get(_HOST) else util.get_ip_address()
        for port in self.get_server_ports():
            with suppress(OSError):
                self._listener = socket.create_server((place, port))
                return self._listener
        raise ConfigError(f"no port of {self.get_server_ports()} is free.\nHint: ${_PORT} sets others.")

    def await_reservations(
        self, sc: Any = None, status: Mapping[str, Any] | None = None, timeout: float = 600
    ) -> list[Reservation]:
        """Wait for all nodes, so many seconds; an "error" in `status` ends the waiting."""
        deadline = time.monotonic() + timeout
        while not self.reservations.wait(_LOOK_S):
            if status and "error" in status:
                raise TrainingError(f"a node failed while it started: {status['error']}")
            if time.monotonic() > deadline:
                missing = self.reservations.remaining()
                raise StartTimeoutError(f"{missing} nodes have not registered in {timeout:g} s.")
        return self.reservations.get()

    def stop(self) -> None:
        self.done = True
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()

    def _serve(self, listener: socket.socket) -> None:
        while not self.done:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(client,), name="reservation", daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as lines, suppress(OSError, ValueError, KeyError, TypeError):
            while line := lines.readline(_MOST_BYTES):
                answer = self._answer(json.loads(line))
                client.sendall(json.dumps(answer).encode() + b"\n")

    def _answer(self, message: Mapping[str, Any]) -> Any:
        kind = message["type"]
        if kind == "REG":
            self.reservations.upsert(dict(message["data"]))
            return "OK"
        if kind == "QUERY":
            return self.reservations.done()
        if kind == "QINFO":
            return self.reservations.get()
        if kind == "STOP":
            self.stop()
            return "OK"
        return "ERR"


class Client:
    """A connection to a `Server`, at what its `start` returned."""

    def __init__(self, server_addr: Sequence[Any]) -> None:
        host, port = server_addr
        self.server_addr = (str(host), int(port))
        self._socket = socket.create_connection(self.server_addr, timeout=_CONNECT_S)
        self._lines = self._socket.makefile("rb")

    def register(self, reservation: Mapping[str, Any]) -> str:
        """Register a node; fields are what JSON has. Returns "OK"."""
        return str(self._ask("REG", dict(reservation)))

    def get_reservations(self) -> list[Reservation]:
        known: list[Reservation] = self._ask("QINFO")
        return known

    def await_reservations(self) -> list[Reservation]:
        while not self._ask("QUERY"):
            time.sleep(_LOOK_S)
        return self.get_reservations()

    def request_stop(self) -> str:
        return str(self._ask("STOP"))

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def _ask(self, kind: str, data: Reservation | None = None) -> Any:
        self._socket.sendall(json.dumps({"type": kind, "data": data}).encode() + b"\n")
        line = self._lines.readline(_MOST_BYTES)
        if not line:
            raise ConnectionError(f"the reservation server at {self.server_addr} disconnected")
        return json.loads(line)
