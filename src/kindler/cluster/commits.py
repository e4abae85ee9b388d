"""Checkpoints of a program that is fed by a stream: a folder for each micro-batch, moved into place whole.

Its name has the micro-batch's number, so the model and how far the stream has come can never disagree.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kindler.files import beside

_NAME = re.compile(r"micro-batch-(\d+)")
_KEPT = 2


def newest(folder: str) -> tuple[int, str] | None:
    """The last micro-batch of which there is a checkpoint, and its path."""
    found = _all(Path(folder))
    return None if not found else (found[-1][0], str(found[-1][1]))


@contextmanager
def place(folder: str, micro_batch: int, *, keep: bool) -> Iterator[str]:
    """A folder to write a checkpoint to; it counts once the block has ended well.

    Args:
        folder: Where checkpoints are.
        micro_batch: What it is a checkpoint of.
        keep: Whether it is to be kept; otherwise it goes away.
    """
    if not keep:
        with tempfile.TemporaryDirectory() as temporary:
            yield temporary
        return
    with beside(Path(folder) / f"micro-batch-{micro_batch:012d}", overwrite=True) as unfinished:
        unfinished.mkdir()
        yield str(unfinished)
    for _, path in _all(Path(folder))[:-_KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def _all(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)
