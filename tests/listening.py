"""Which addresses the processes of a run listen on."""

from __future__ import annotations

import ipaddress
from typing import Any

import psutil


def listeners(root: int) -> list[tuple[str, str]]:
    """(name, address) of every listening socket of `root` and its descendants, Spark's JVM aside."""
    found = []
    process = psutil.Process(root)
    for one in (process, *process.children(recursive=True)):
        try:
            if one.name() != "java":
                found += [
                    (one.name(), c.laddr.ip) for c in one.net_connections("inet") if c.status == "LISTEN"
                ]
        except psutil.NoSuchProcess:
            pass  # it ended meanwhile
    return found


def wildcards(seen: list[Any]) -> list[Any]:
    """Those that listen on every address of the machine."""
    return [(name, address) for name, address in seen if ipaddress.ip_address(address).is_unspecified]
