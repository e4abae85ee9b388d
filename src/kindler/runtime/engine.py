"""What runs tasks: the promise that every engine makes, and the table of engines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from kindler.errors import ConfigError
from kindler.registry import Registry, Spec
from kindler.runtime.messages import Report, Task

__all__ = ["Engine", "Listener", "Load", "default_broker", "open_engine"]

Listener: TypeAlias = Callable[[Report], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What an engine has to do.

    Attributes:
        engine: "local", or the kind of its broker.
        workers: How many tasks can run at a time.
        busy: How many run.
        waiting: How many wait for a worker.
    """

    engine: str
    workers: int
    busy: int
    waiting: int


class Engine(Protocol):
    """Runs tasks somewhere.

    Each task that was submitted gets one report that is not "running", whatever happens to its worker: it
    is never lost. A worker that goes away in the middle of it is replaced `max_retries` times; then the
    task has failed, with that reason. So a task may run more than once.
    """

    def submit(self, task: Task, listen: Listener) -> None:
        """Run a task; `listen` hears of it, on some other thread.

        Raises:
            ConfigError: The task can never run here.
        """

    def cancel(self, task_id: str) -> None:
        """Do not run a task, or end it where it runs; one that has ended stays as it is."""

    def load(self) -> Load:
        """What it has to do now.

        Raises:
            BrokerError: Its broker cannot be reached.
        """

    def close(self) -> None:
        """Let everything go; tasks that have not ended are cancelled."""


_ENGINES = Registry(
    "engine",
    [
        Spec(name="local", target="kindler.runtime.local:LocalEngine"),
        Spec(name="broker", target="kindler.runtime.broker:BrokerEngine", package="celery", extra="celery"),
    ],
)
_BROKERS = ("redis", "rediss", "amqp", "amqps")


def default_broker(environ: Mapping[str, str]) -> str | None:
    """The broker that the environment names; None for workers of this machine."""
    return environ.get("KINDLER_BROKER") or None


def open_engine(store: str, broker: str | None = None) -> Engine:
    """The engine for a store's tasks.

    Args:
        store: The store's URL.
        broker: `redis://host/0` or `amqp://user@host//`; `local://?workers=2` for two processes of this
            machine; None takes `KINDLER_BROKER`, or workers of this machine.

    Raises:
        ConfigError: The store cannot be reached from another process, or the broker is of no known kind.
        MissingExtraError: Celery is not installed.
    """
    named = broker or default_broker(os.environ)
    if store.startswith("memory:"):
        raise ConfigError(
            "the runtime cannot use an in-memory store: its workers are other processes.\n"
            "Hint: om.setup('folder') keeps the store in a folder."
        )
    if "://" not in store:
        store = os.path.abspath(os.path.expanduser(store))  # a worker may stand in another folder
    made: Engine
    if named is None or named.startswith("local:"):
        made = _ENGINES.load("local")(store, workers=_workers(named or "local://"))
        return made
    if named.partition("://")[0] not in _BROKERS:
        raise ConfigError(
            f"unknown kind of broker {named.partition('://')[0]!r}.\nHint: use redis://host:6379/0 or"
            " amqp://user:password@host:5672//."
        )
    made = _ENGINES.load("broker")(store, named)
    return made


def _workers(url: str) -> int | None:
    given = dict(parse_qsl(urlsplit(url).query))
    wanted = given.pop("workers", None)
    if given or (wanted is not None and not (wanted.isdecimal() and int(wanted))):
        raise ConfigError(f"invalid engine URL {url!r}.\nHint: local://?workers=2.")
    return None if wanted is None else int(wanted)
