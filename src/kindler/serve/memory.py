"""The memory of the server's own process: how much it is, and giving back what is not needed any more."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource

_LOOK_S = 5.0
_CHANGED_BYTES = 32 << 20
_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 4 << 20  # glibc's number of the setting, and the setting


def resident_bytes() -> int:
    """What the process has in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


async def keep_tidy() -> None:
    """Give memory back after it has grown or fallen, for as long as the server runs.

    Large bodies and answers leave holes that the allocator keeps, and calls over gRPC that were cut off leave
    circles that Python finds when it looks.
    """
    library = ctypes.CDLL(None)
    trim = getattr(library, "malloc_trim", None)
    if hasattr(library, "mallopt"):
        # What is as large goes back when it is freed; trimming leaves what lies last in a thread's own area.
        library.mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
    before, settled = resident_bytes(), True
    while True:
        await asyncio.sleep(_LOOK_S)
        if settled and abs(resident_bytes() - before) <= _CHANGED_BYTES:
            continue
        gc.collect()  # what was there at the start is frozen, so that this is short
        if trim is not None:
            await asyncio.to_thread(trim, 0)
        now = resident_bytes()
        # Once more, until it stays: what was given back amid large answers is not all that can be.
        settled, before = abs(now - before) <= _CHANGED_BYTES, now
