"""TCP ports that are held for a user's program until it binds them itself.

A held port is bound with SO_REUSEADDR and not listened on. The kernel gives it to nobody who asks for any
free port, and lets a program bind it that sets SO_REUSEADDR as well: gRPC (TensorFlow, JAX), torch's store,
asyncio, HTTP servers. For a program that does not, the port must be released first.
"""

from __future__ import annotations

import random
import socket

_V4, _V6 = "0.0.0.0", "::"  # every address: it is not known which one the program binds


class HeldPorts:
    """`count` ports of this machine, held until `release`.

    Args:
        count: How many.
        address: An address of this machine, whose family counts.
        ports: The first and the last of the ports that may be taken; None is any.

    Raises:
        OSError: There are not as many free ones.
    """

    def __init__(self, count: int, *, address: str, ports: tuple[int, int] | None = None) -> None:
        self._sockets: list[socket.socket] = []
        try:
            while len(self._sockets) < count:
                self._sockets.append(_hold(address, ports))
        except OSError:
            self.release()
            raise
        self.numbers: tuple[int, ...] = tuple(held.getsockname()[1] for held in self._sockets)

    def release(self) -> None:
        """Let go of the ports; may be called again."""
        while self._sockets:
            self._sockets.pop().close()


def _hold(address: str, ports: tuple[int, int] | None) -> socket.socket:
    if ports is None:
        return _bound(address, 0)
    for port in random.sample(range(ports[0], ports[1] + 1), ports[1] - ports[0] + 1):
        try:
            return _bound(address, port)
        except OSError:
            continue
    raise OSError(f"no port from {ports[0]} to {ports[1]} is free")


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.bind((_V6 if family == socket.AF_INET6 else _V4, port))
        # Only now: a port that somebody else holds is not taken a second time.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
    except OSError:
        held.close()
        raise
    return held
