"""`kindler serve` and `kindler keys`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from kindler.errors import MissingExtraError
from kindler.store.urls import default_url

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add `kindler serve` and `kindler keys`."""
    _add_serve(commands.add_parser("serve", help="serve the models of a store over HTTP"))
    _add_keys(commands.add_parser("keys", help="create, list and remove the API keys of a store"))


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8000, help="port; 0 picks a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--broker", metavar="URL", help="broker that runs tasks (default: KINDLER_BROKER, or this machine)"
    )
    parser.add_argument("--model", help="model that /invocations uses")
    parser.add_argument(
        "--trusted", action="store_true", help="allow models and scripts that can run code of the store"
    )
    parser.add_argument(
        "--alone", metavar="NAME", action="append", default=[],
        help="model whose requests are never batched together; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--isolation", choices=["process", "none"], default="process",
        help="run models in processes of their own, or in the server's (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=_count, metavar="N", default=None,
        help="maximum processes of one model; auto chooses by the cores (default: auto)",
    )  # fmt: skip
    for name, kind, text in _LIMITS:
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    parser.set_defaults(run=_serve)


_LIMITS = (
    ("batch-rows", int, "maximum rows in one call of a model"),
    ("batches", int, "concurrent calls of one model, with --isolation none"),
    ("queue-rows", int, "maximum rows queued for one model"),
    ("queue-bytes", int, "maximum bytes queued for one model"),
    ("body-bytes", int, "maximum size of a request body"),
    ("rows", int, "maximum rows in one request"),
    ("timeout-s", float, "timeout of a request in seconds"),
    ("memory-bytes", int, "memory for all loaded models together"),
    ("model-memory-bytes", int, "memory for each process of a model"),
    ("load-s", float, "seconds that loading a model may take"),
    ("refresh-s", float, "seconds between checks for moved aliases"),
    ("drain-s", float, "seconds that running requests get when the server stops"),
)


def _count(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _serve(chosen: argparse.Namespace) -> int:
    try:
        from kindler.serve.server import serve
        from kindler.serve.settings import ServeSettings
    except ModuleNotFoundError as exc:
        raise _lacking(exc) from exc
    names = [name.replace("-", "_") for name, *_ in _LIMITS]
    limits = {name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None}
    limits |= {"isolation": chosen.isolation, "processes": chosen.processes}
    settings = ServeSettings(model=chosen.model, trusted=chosen.trusted, alone=tuple(chosen.alone), **limits)
    serve(
        chosen.store,
        host=chosen.host,
        port=chosen.port,
        broker=chosen.broker,
        settings=settings,
        say=lambda line: print(line, flush=True),
    )
    return 0


def _add_keys(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)
    adding = verbs.add_parser("add", help="create a key and print it once")
    adding.add_argument(
        "--scope", action="append", required=True, choices=["read", "predict", "write", "admin"],
        help="what the key allows; repeatable",
    )  # fmt: skip
    adding.add_argument("--note", default="", help="a note on what it is for")
    adding.add_argument("--days", type=float, help="days until it expires (default: never)")
    listing = verbs.add_parser("ls", help="list the keys, without their secrets")
    removing = verbs.add_parser("rm", help="remove a key")
    removing.add_argument("id", help="id of the key, as `ls` prints it")
    for verb, run in ((adding, _add), (listing, _list), (removing, _remove)):
        _add_store(verb)
        verb.set_defaults(run=run)


def _add(chosen: argparse.Namespace) -> int:
    _, token = _keys(chosen).add(chosen.scope, note=chosen.note, days=chosen.days)
    print(token)
    return 0


def _list(chosen: argparse.Namespace) -> int:
    for key in _keys(chosen).list():
        until = f"until {key.expires:%Y-%m-%d}" if key.expires else "never expires"
        over = " (expired)" if key.is_over() else ""
        print(
            f"{key.id}  {' '.join(key.scopes):<24} {key.created:%Y-%m-%d} {until}{over}  {key.note}".rstrip()
        )
    return 0


def _remove(chosen: argparse.Namespace) -> int:
    _keys(chosen).remove(chosen.id)
    return 0


def _keys(chosen: argparse.Namespace) -> Any:
    try:
        from kindler.store.keys import Keys
    except ModuleNotFoundError as exc:
        raise _lacking(exc) from exc
    return Keys(chosen.store or default_url(os.environ))


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        metavar="URL",
        help="URL of the store (default: KINDLER_STORE, or ~/.local/share/kindler/store)",
    )


def _lacking(error: ModuleNotFoundError) -> Exception:
    package = (error.name or "").partition(".")[0]
    if package not in (
        "fastapi",
        "uvicorn",
        "orjson",
        "prometheus_client",
        "sqlalchemy",
        "starlette",
        "pydantic",
    ):
        return error
    return MissingExtraError(what="the server", package=package, extra="serve")
