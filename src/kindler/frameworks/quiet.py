"""Native code that complains about a missing GPU driver, where no GPU is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_without_gpu() -> Iterator[None]:
    """Silence the process's standard error within the block, on machines without an NVIDIA driver.

    TensorFlow's native code writes there that there is no driver, whatever Python's settings say; no worker's
    log needs that line.
    """
    if os.path.exists("/dev/nvidiactl"):
        yield
        return
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
