"""Where a study is kept, and what of an earlier driver is found there.

A study is run by one driver at a time. A driver that died leaves trials that look as if they still ran: the
next one marks them as failed, and runs their values again.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from os import PathLike
from pathlib import Path

import optuna
from optuna.trial import TrialState

from kindler.errors import ConfigError, MissingExtraError

LOST = "kindler:lost"
_OWNER = "kindler:owner"


def storage_url(storage: str | None, folder: str | PathLike[str] | None) -> str | None:
    """The URL of a study's database; None keeps it in memory.

    Raises:
        ConfigError: It is neither SQLite nor PostgreSQL.
        MissingExtraError: PostgreSQL's driver is not installed.
    """
    if storage is None:
        return None if folder is None else f"sqlite:///{Path(folder).absolute() / 'study.db'}"
    scheme, separator, rest = storage.partition("://")
    if separator and scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        try:
            import psycopg  # noqa: F401
        except ModuleNotFoundError as exc:
            raise MissingExtraError(
                what="a study in PostgreSQL", package="psycopg", extra="postgres"
            ) from exc
        return f"postgresql+psycopg://{rest}"
    if not separator or scheme != "sqlite":
        raise ConfigError(f"storage={storage!r}: expected sqlite:///FILE or postgresql://USER@HOST/DATABASE.")
    return storage


def claim(study: optuna.Study) -> None:
    """Become the driver of a study.

    Raises:
        ConfigError: Another process of this machine is.
    """
    owner = study.user_attrs.get(_OWNER) or {}
    is_other = owner.get("host") == socket.gethostname() and owner.get("pid") != os.getpid()
    if is_other and owner.get("since") is not None and _began(int(owner["pid"])) == owner["since"]:
        raise ConfigError(
            f"the study {study.study_name!r} is being run by process {owner['pid']} of this machine.\n"
            "Hint: wait for it, or choose another name=."
        )
    pid = os.getpid()
    study.set_user_attr(_OWNER, {"host": socket.gethostname(), "pid": pid, "since": _began(pid)})


def release(study: optuna.Study) -> None:
    """Leave the study to whoever comes next."""
    study.set_user_attr(_OWNER, None)


def retake(study: optuna.Study) -> int:
    """Mark the trials that a dead driver left as failed, and queue their values again; returns how many."""
    left = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    for trial in left:
        study._storage.set_trial_user_attr(trial._trial_id, LOST, True)
        study.tell(trial.number, state=TrialState.FAIL)
        if trial.params:
            study.enqueue_trial(trial.params)
    return len(left)


def _began(pid: int) -> str | None:
    """When a process of this machine was started, in the kernel's own count; None if there is none."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None
