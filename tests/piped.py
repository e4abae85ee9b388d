"""Standard output as a pipe has it: what is written and not flushed stays in the process."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


class _Pipe(io.RawIOBase):
    def __init__(self) -> None:
        self.pieces: list[str] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.pieces.append(bytes(data).decode())
        return len(data)


@contextmanager
def piped_stdout() -> Iterator[list[str]]:
    """What has left the process through standard output, write by write."""
    pipe = _Pipe()
    with redirect_stdout(io.TextIOWrapper(io.BufferedWriter(pipe))):
        yield pipe.pieces
