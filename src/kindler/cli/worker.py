"""`kindler worker`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from kindler.errors import ConfigError, MissingExtraError
from kindler.store.urls import default_url

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser("worker", help="run the tasks of a broker: predict, fit, scripts")
    parser.add_argument("--store", metavar="URL", help="the store (default: KINDLER_STORE, or your own)")
    parser.add_argument(
        "--broker", metavar="URL", help="redis://host/0 or amqp://user@host// (default: KINDLER_BROKER)"
    )
    parser.add_argument(
        "--label",
        action="append",
        metavar="NAME",
        help="take the tasks that require this label; may be given several times (default: 'default')",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="tasks at a time (default: a core each, up to 4)"
    )
    parser.add_argument("--trusted", action="store_true", help="run functions and pickles of the store")
    parser.set_defaults(run=_work)


def _work(chosen: argparse.Namespace) -> int:
    from kindler.runtime.engine import default_broker

    broker = chosen.broker or default_broker(os.environ)
    if broker is None:
        raise ConfigError("no broker was named.\nHint: --broker redis://host/0, or KINDLER_BROKER.")
    if chosen.workers is not None and chosen.workers < 1:
        raise ConfigError(f"--workers {chosen.workers}: must be at least 1.")
    try:
        from kindler.runtime.broker_worker import run_worker
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in ("celery", "kombu"):
            raise
        raise MissingExtraError(what="a worker of a broker", package="celery", extra="celery") from exc
    return run_worker(
        chosen.store or default_url(os.environ),
        broker,
        labels=tuple(chosen.label or ("default",)),
        workers=chosen.workers,
        trusted=chosen.trusted,
        say=lambda line: print(line, flush=True),
    )
