"""The address under which a worker is reached by the others of its run."""

from __future__ import annotations

import socket
from collections.abc import Collection
from contextlib import closing

_LOOPBACK = "127.0.0.1"


def own_address(hosts: Collection[str], *, seen: str) -> str:
    """The address of this machine for workers on `hosts`.

    By address: a host name may not resolve, or resolve to an interface that others cannot reach.

    Args:
        hosts: The machine of every worker.
        seen: The address from which this machine reaches the meeting point.
    """
    return _LOOPBACK if len(set(hosts)) == 1 else seen


def address_towards(host: str) -> str:
    """The address of the interface by which this machine reaches `host`; nothing is sent."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:  # no route at all: this machine only
        return _LOOPBACK
