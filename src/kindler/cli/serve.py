"""`kindler serve` and `kindler keys`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from kindler.errors import ConfigError, MissingExtraError
from kindler.store.urls import default_url


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
    parser.add_argument(
        "--device", metavar="[NAME=]DEVICE", action="append", default=[],
        help="where models compute: auto, cpu, cuda or cuda:N; NAME=cuda:1 for one model; repeatable"
        " (default: auto)",
    )  # fmt: skip
    for name, kind, text in _LIMITS:
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    _add_edges(parser)
    parser.set_defaults(run=_serve)


def _add_edges(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grpc-port", type=int, metavar="PORT",
        help="also serve the Open Inference Protocol over gRPC on this port; 0 picks a free one",
    )  # fmt: skip
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate chain in PEM format, for https")
    parser.add_argument("--tls-key", metavar="FILE", help="its private key in PEM format")
    parser.add_argument(
        "--tls-client-ca", metavar="FILE", help="demand client certificates that this authority signed"
    )
    parser.add_argument(
        "--cors-origin", metavar="ORIGIN", action="append", default=[],
        help="let web pages of this origin use the server, such as https://shop.example; repeatable",
    )  # fmt: skip
    parser.add_argument("--access-log", metavar="FILE", help="write a JSON line per request; - is stderr")
    parser.add_argument(
        "--audit-log", metavar="FILE", help="write a JSON line per change and refused key; - is stderr"
    )
    parser.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], default="info",
        help="least level of log lines; a 4xx status is a warning, 5xx an error (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--log-format", choices=["text", "json"], default="text",
        help="format of the server's own messages on stderr (default: %(default)s)",
    )  # fmt: skip


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
    ("device-memory-bytes", int, "memory of each GPU for all loaded models together"),
    ("load-s", float, "seconds that loading a model may take"),
    ("refresh-s", float, "seconds between checks for moved aliases"),
    ("task-results", int, "maximum number of tasks to remember"),
    ("task-result-bytes", int, "memory for the results of finished tasks together"),
    ("task-result-s", float, "seconds that the result of a finished task is kept"),
    ("drain-s", float, "seconds that running requests get when the server stops"),
)


def _count(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _devices(given: list[str]) -> dict[str, Any]:
    """The device of all models, and those of single ones; a name may have an equals sign, a device has none.

    Raises:
        ConfigError: Several devices were given for all models.
    """
    pairs = [text.rpartition("=") for text in given]
    common = [device for _, named, device in pairs if not named]
    if len(common) > 1:
        raise ConfigError(f"--device was given {len(common)} times for all models: {', '.join(common)}.")
    return {
        "device": common[0] if common else "auto",
        "devices": {name: device for name, named, device in pairs if named},
    }


def _serve(chosen: argparse.Namespace) -> int:
    try:
        from kindler.serve.request_log import configure
        from kindler.serve.server import serve
        from kindler.serve.settings import ServeSettings
        from kindler.serve.tls import Tls
    except ModuleNotFoundError as exc:
        raise _lacking(exc) from exc
    names = [name.replace("-", "_") for name, *_ in _LIMITS]
    limits = {name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None}
    settings = ServeSettings(
        model=chosen.model,
        trusted=chosen.trusted,
        alone=tuple(chosen.alone),
        access_log=chosen.access_log,
        audit_log=chosen.audit_log,
        log_level=chosen.log_level,
        cors_origins=tuple(chosen.cors_origin),
        isolation=chosen.isolation,
        processes=chosen.processes,
        **_devices(chosen.device),
        **limits,
    )
    if (chosen.tls_cert is None) != (chosen.tls_key is None) or (
        chosen.tls_client_ca and not chosen.tls_cert
    ):
        raise ConfigError("--tls-cert and --tls-key belong together, and --tls-client-ca needs both.")
    tls = None if chosen.tls_cert is None else Tls(chosen.tls_cert, chosen.tls_key, chosen.tls_client_ca)
    configure(chosen.log_level, chosen.log_format)
    serve(
        chosen.store,
        host=chosen.host,
        port=chosen.port,
        broker=chosen.broker,
        settings=settings,
        grpc_port=chosen.grpc_port,
        tls=tls,
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
    adding.add_argument(
        "--bucket", action="append", default=[], metavar="NAME", help="only for this bucket; repeatable"
    )
    for shelf in ("model", "dataset", "script"):
        adding.add_argument(
            f"--{shelf}", action="append", default=[], metavar="GLOB",
            help=f"only for {shelf}s of these names, and for nothing else that is not listed; repeatable",
        )  # fmt: skip
    listing = verbs.add_parser("ls", help="list the keys, without their secrets")
    removing = verbs.add_parser("rm", help="remove a key")
    removing.add_argument("id", help="id of the key, as `ls` prints it")
    for verb, run in ((adding, _add), (listing, _list), (removing, _remove)):
        _add_store(verb)
        verb.set_defaults(run=run)


def _add(chosen: argparse.Namespace) -> int:
    names = {f"{shelf}s": getattr(chosen, shelf) for shelf in ("model", "dataset", "script")}
    _, token = _keys(chosen).add(
        chosen.scope, note=chosen.note, days=chosen.days, buckets=chosen.bucket, names=names
    )
    print(token)
    return 0


def _list(chosen: argparse.Namespace) -> int:
    for key in _keys(chosen).list():
        until = f"until {key.expires:%Y-%m-%d}" if key.expires else "never expires"
        over = " (expired)" if key.is_over() else ""
        limits = [f"bucket={bucket}" for bucket in key.buckets]
        limits += [
            f"{shelf.removesuffix('s')}={glob}" for shelf, globs in key.names.items() for glob in globs
        ]
        told = " ".join([*limits, key.note])
        print(f"{key.id}  {' '.join(key.scopes):<24} {key.created:%Y-%m-%d} {until}{over}  {told}".rstrip())
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
