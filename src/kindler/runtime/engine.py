"""The contract of engines, which run tasks, and the choice among them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from kindler.errors import ConfigError
from kindler.registry import Registry, Spec
from kindler.runtime.messages import Report, Task

Listener: TypeAlias = Callable[[Report], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How many tasks can run at a time, are running, and are waiting for a worker; `engine` is "local", or
    the kind of broker."""

    engine: str
    workers: int
    busy: int
    waiting: int


class Engine(Protocol):
    """Runs tasks.

    Each submitted task gets exactly one report that is not "running", even if its worker dies: no task is
    lost. A task whose worker is lost is started again `max_retries` times, and then fails with that reason. A
    task may therefore run more than once.
    """

    def submit(self, task: Task, listen: Listener) -> None:
        """Run a task; `listen` is called with its reports, on another thread.

        Raises:
            ConfigError: This engine cannot run the task.
        """

    def cancel(self, task_id: str) -> None:
        """Cancel a task, even if it is running; no effect if it has ended."""

    def load(self) -> Load:
        """The current load.

        Raises:
            BrokerError: Its broker cannot be reached.
        """

    def close(self) -> None:
        """Cancel tasks that have not ended, and release all resources."""


_ENGINES = Registry(
    "engine",
    [
        Spec(name="local", target="kindler.runtime.local:LocalEngine"),
        Spec(name="broker", target="kindler.runtime.broker:BrokerEngine", package="kombu", extra="broker"),
    ],
)
_BROKERS = ("redis", "rediss", "amqp", "amqps")


def default_broker(environ: Mapping[str, str]) -> str | None:
    """The broker in the environment; None means local workers."""
    return environ.get("KINDLER_BROKER") or None


def open_engine(store: str, broker: str | None = None) -> Engine:
    """The engine for a store's tasks.

    Args:
        store: The store's URL.
        broker: `redis://host/0` or `amqp://user@host//`; `local://?workers=2` for two local processes; None
            uses `KINDLER_BROKER`, or local workers.

    Raises:
        ConfigError: The store is in memory, or the kind of broker is unknown.
        MissingExtraError: kombu is not installed.
    """
    named = broker or default_broker(os.environ)
    if store.startswith("memory:"):
        raise ConfigError(
            "the runtime cannot use an in-memory store: its workers are other processes.\n"
            "Hint: om.setup('folder') keeps the store in a folder."
        )
    if "://" not in store:
        store = os.path.abspath(os.path.expanduser(store))  # a worker may run in another folder
    kind = (named or "local").partition(":")[0]
    if kind == "local":
        local: Engine = _ENGINES.load("local")(store, **_local_options(named or "local://"))
        return local
    if kind not in _BROKERS:
        raise ConfigError(
            f"unknown kind of broker {kind!r}.\nHint: use redis://host:6379/0 or"
            " amqp://user:password@host:5672//."
        )
    through_broker: Engine = _ENGINES.load("broker")(store, named)
    return through_broker


def without_trust(broker: str | None) -> str | None:
    """The same broker; local workers do not run code from the store, and call its models in sandboxed
    processes."""
    named = broker or default_broker(os.environ) or "local://"
    if not named.startswith("local:"):
        return broker  # whose workers say for themselves whom they trust
    return f"{named}{'&' if '?' in named else '?'}trusted=0"


def _local_options(url: str) -> dict[str, Any]:
    """The number of local processes, and whether they may run code of the store."""
    parameters = dict(parse_qsl(urlsplit(url).query))
    workers, trusted = parameters.pop("workers", None), parameters.pop("trusted", "1")
    is_valid = workers is None or (workers.isdecimal() and int(workers))
    if parameters or not is_valid or trusted not in ("0", "1"):
        raise ConfigError(f"invalid engine URL {url!r}.\nHint: local://?workers=2.")
    return {"workers": workers and int(workers), "trusted": trusted == "1"}
