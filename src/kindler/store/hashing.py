"""SHA-256 of files, and copies that are hashed on the way."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from kindler.errors import DamagedError

_CHUNK_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    """What is in the file, as a hash."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(_CHUNK_BYTES)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def copy_hashed(source: BinaryIO, target: Path, *, at_most: int | None = None) -> tuple[str, int]:
    """Write what can be read; returns its hash and its size.

    Args:
        source: Read to its end.
        target: The file to write; must not be there.
        at_most: Stop one chunk after so many bytes: the size that comes back says that there were more.
    """
    digest, size = hashlib.sha256(), 0
    with target.open("xb") as file:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
            if at_most is not None and size > at_most:
                break
    return digest.hexdigest(), size


def check_whole(path: Path, sha256: str) -> None:
    """Compare a file with its name.

    Raises:
        DamagedError: It is something else.
    """
    actual = sha256_of(path)
    if actual != sha256:
        raise DamagedError(sha256=sha256, problem=f"its bytes hash to {actual}")
