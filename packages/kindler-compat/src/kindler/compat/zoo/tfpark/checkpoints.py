"""Checkpoints of a run by the folder and the step of the run that wrote them."""

from __future__ import annotations

import os
import re
from os import PathLike

from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.files import folder_at

__all__ = ["find"]

_NAME = re.compile(r"checkpoint-(\d+)-epoch-\d+-step-(\d+)\.kindler")


def find(path: str | PathLike[str], version: int | None = None) -> str:
    """A checkpoint's file.

    Args:
        path: The file itself, or the folder that it is in.
        version: The step after which it was written; None is the newest.

    Raises:
        ConfigError: There is none.
    """
    if os.path.isfile(path):
        return os.fspath(path)
    if version is None:
        newest = Estimator.latest_checkpoint(path)
        if newest is None:
            raise ConfigError(f"there is no checkpoint in {path}.")
        return newest
    folder = folder_at(path)
    matches = [match for name in sorted(folder.names()) if (match := _NAME.fullmatch(name))]
    written = {int(match[2]): match[0] for match in matches}  # the newest of each step
    if version not in written:
        raise ConfigError(f"there is no checkpoint of step {version} in {path}; there are {sorted(written)}.")
    return folder.path(written[version])
