"""`kindler serve` and `kindler keys`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from kindler.errors import MissingExtraError
from kindler.store.urls import default_url

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add the commands to the parser's."""
    _add_serve(commands.add_parser("serve", help="serve the models of a store over HTTP"))
    _add_keys(commands.add_parser("keys", help="make, list and remove the API keys of a store"))


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_store(parser)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8000, help="the port; 0 takes a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--broker", metavar="URL", help="what runs tasks (default: KINDLER_BROKER, or this machine)"
    )
    parser.add_argument("--model", help="the model that /invocations means")
    parser.add_argument("--trusted", action="store_true", help="load and run what could be code of others")
    parser.add_argument(
        "--alone", metavar="NAME", action="append", default=[],
        help="a model whose requests never share a call; may be given several times",
    )  # fmt: skip
    for name, kind, text in _LIMITS:
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    parser.set_defaults(run=_serve)


_LIMITS = (
    ("batch-rows", int, "most rows in one call of a model"),
    ("batches", int, "calls of one model at a time"),
    ("queue-rows", int, "most rows that wait for one model"),
    ("queue-bytes", int, "most bytes that wait for one model"),
    ("body-bytes", int, "largest body of a request"),
    ("rows", int, "most rows in one request"),
    ("timeout-s", float, "seconds until a request is given up"),
    ("memory-bytes", int, "what loaded models may take together"),
    ("refresh-s", float, "seconds for which an alias is taken to stand where it stood"),
    ("drain-s", float, "seconds that running requests get when the server is stopped"),
)


def _serve(chosen: argparse.Namespace) -> int:
    try:
        from kindler.serve.server import serve
        from kindler.serve.settings import ServeSettings
    except ModuleNotFoundError as exc:
        raise _lacking(exc) from exc
    names = [name.replace("-", "_") for name, *_ in _LIMITS]
    given = {name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None}
    settings = ServeSettings(model=chosen.model, trusted=chosen.trusted, alone=tuple(chosen.alone), **given)
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
    adding = verbs.add_parser("add", help="make a key, and show it once")
    adding.add_argument(
        "--scope", action="append", required=True, choices=["read", "predict", "write", "admin"],
        help="what it allows; may be given several times",
    )  # fmt: skip
    adding.add_argument("--note", default="", help="what it is for")
    adding.add_argument("--days", type=float, help="how long it is good for")
    listing = verbs.add_parser("ls", help="list the keys, without their secrets")
    removing = verbs.add_parser("rm", help="take a key away")
    removing.add_argument("id", help="its id, as `ls` shows it")
    for verb, run in ((adding, _add), (listing, _list), (removing, _remove)):
        _add_store(verb)
        verb.set_defaults(run=run)


def _add(chosen: argparse.Namespace) -> int:
    _, token = _keys(chosen).add(chosen.scope, note=chosen.note, days=chosen.days)
    print(token)
    return 0


def _list(chosen: argparse.Namespace) -> int:
    for key in _keys(chosen).list():
        until = f"until {key.expires:%Y-%m-%d}" if key.expires else "for ever"
        over = " (over)" if key.is_over() else ""
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
    parser.add_argument("--store", metavar="URL", help="the store (default: KINDLER_STORE, or your own)")


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
