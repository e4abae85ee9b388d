"""`kindler worker`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from kindler.errors import ConfigError, MissingExtraError
from kindler.store.urls import default_url


def add_commands(commands: Any) -> None:
    """Add `kindler worker`."""
    parser = commands.add_parser("worker", help="run the tasks of a broker: predict, fit, scripts")
    parser.add_argument(
        "--store",
        metavar="URL",
        help="URL of the store (default: KINDLER_STORE, or ~/.local/share/kindler/store)",
    )
    parser.add_argument(
        "--broker", metavar="URL", help="redis://host/0 or amqp://user@host// (default: KINDLER_BROKER)"
    )
    parser.add_argument(
        "--label",
        action="append",
        metavar="NAME",
        help="take tasks that require this label; repeatable (default: 'default')",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="concurrent tasks (default: one per core, up to 4)"
    )
    parser.add_argument(
        "--trusted", action="store_true", help="allow functions and pickles of the store to run"
    )
    parser.set_defaults(run=_work)


def _work(chosen: argparse.Namespace) -> int:
    from kindler.runtime.engine import default_broker

    broker = chosen.broker or default_broker(os.environ)
    if broker is None:
        raise ConfigError("no broker.\nHint: pass --broker redis://host/0, or set KINDLER_BROKER.")
    if chosen.workers is not None and chosen.workers < 1:
        raise ConfigError(f"--workers {chosen.workers}: must be at least 1.")
    try:
        from kindler.runtime.broker_worker import run_worker
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in ("celery", "kombu"):
            raise
        raise MissingExtraError(what="kindler worker", package="celery", extra="celery") from exc
    return run_worker(
        chosen.store or default_url(os.environ),
        broker,
        labels=tuple(chosen.label or ("default",)),
        workers=chosen.workers,
        trusted=chosen.trusted,
        say=lambda line: print(line, flush=True),
    )
