"""Which GPUs of its machine a node uses: those that Spark gave to its task, else free ones that it claims.

A claim is a lock on a file of this user's, held as long as the process lives, so that nodes of one machine,
of one cluster or of several, never share a GPU by accident.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from kindler.engine.gpus import VISIBLE_GPUS, ask_driver, gpus_of_task, machine_gpus
from kindler.errors import ConfigError
from kindler.temporary import private_folder

_held: list[IO[str]] = []  # the claims of this process


def assign_gpus(wanted: int | None, *, position: int, nodes: int) -> tuple[str, ...] | None:
    """Set this process's visible GPUs, before a framework looks for them.

    Args:
        wanted: How many; None is what Spark gave, else an equal part of the machine's.
        position: The node's number among those of its machine that compute.
        nodes: How many those are.

    Returns:
        The GPUs; None where there are none and nothing was set.

    Raises:
        ConfigError: There are not as many as were asked for.
    """
    given = tuple(gpus_of_task())
    chosen: Sequence[str]
    if given:
        chosen = given if wanted is None else given[:wanted]
    elif wanted == 0:
        chosen = ()
    else:
        all_here = machine_gpus()
        if not all_here and wanted is None:
            return None
        count = wanted if wanted is not None else max(1, len(all_here) // nodes)
        free = free_gpus(all_here)
        start = position * count % max(1, len(free))  # nodes that start at once do not all try the same one
        chosen = claim([*free[start:], *free[:start]], count)
    if wanted is not None and len(chosen) < wanted:
        raise ConfigError(
            f"gpus={wanted} for each node, but {len(chosen)} were free for this one.\n"
            "Hint: fewer nodes on a machine, or gpus=None to take what there is."
        )
    os.environ[VISIBLE_GPUS] = ",".join(chosen)
    return tuple(chosen)


def free_gpus(gpus: Sequence[str]) -> list[str]:
    """Those of them on which no process computes."""
    uuids = {number.strip(): uuid.strip() for number, _, uuid in _pairs(ask_driver("--query-gpu=index,uuid"))}
    busy = {uuid.strip() for uuid, _, _ in _pairs(ask_driver("--query-compute-apps=gpu_uuid,pid"))}
    return [number for number in gpus if uuids.get(number, number) not in busy]


def claim(gpus: Sequence[str], count: int, folder: Path | None = None) -> list[str]:
    """Up to `count` of these GPUs that no other process has claimed; they are ours until this one ends."""
    place = folder or private_folder()
    chosen: list[str] = []
    for number in gpus:
        if len(chosen) == count:
            break
        lock = (place / f"gpu-{number.replace('/', '_')}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        _held.append(lock)
        chosen.append(number)
    return chosen


def _pairs(lines: Sequence[str]) -> list[tuple[str, str, str]]:
    return [line.partition(",") for line in lines]
