"""The address under which a worker is reached by the others of its run."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from contextlib import closing

__all__ = ["own_address"]

_LOOPBACK = "127.0.0.1"
_NOWHERE = "192.0.2.1"  # documentation address: asks the kernel for the outgoing interface, sends nothing


def own_address(host: str, hosts: Collection[str]) -> str:
    """The IPv4 address of `host`, this machine, for workers on `hosts`.

    By address: a host name may not resolve, or resolve to an interface that others cannot reach.
    """
    if set(hosts) <= {host}:
        return _LOOPBACK
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        return _outgoing_address()


def _outgoing_address() -> str:
    try:
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            probe.connect((_NOWHERE, 9))
            return str(probe.getsockname()[0])
    except OSError:  # no route at all: this machine only
        return _LOOPBACK
