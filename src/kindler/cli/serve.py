"""`kindler serve`, `kindler keys` and `kindler worker`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from kindler.cli.store import command
from kindler.errors import ConfigError, MissingExtraError

_LIMITS = (
    ("batch-rows", int, "maximum rows in one call of a model"),
    ("batches", int, "concurrent calls of one model, with --isolation none"),
    ("queue-rows", int, "maximum rows queued for one model"),
    ("queue-bytes", int, "maximum bytes queued for one model"),
    ("body-bytes", int, "maximum size of a request body"),
    ("rows", int, "maximum rows in one request"),
    ("answers", int, "answers that one text model generates at the same time"),
    ("queue-answers", int, "maximum prompts that wait for one text model"),
    ("answer-tokens", int, "maximum tokens that one request may ask a text model for"),
    ("prompt-tokens", int, "maximum tokens of a prompt"),
    ("answer-s", float, "timeout of the answer of a text model in seconds"),
    ("timeout-s", float, "timeout of a request in seconds"),
    ("memory-bytes", int, "memory for all loaded models together"),
    ("model-memory-bytes", int, "memory for each process of a model"),
    ("device-memory-bytes", int, "memory of each GPU for all loaded models together"),
    ("load-s", float, "seconds that loading a model may take"),
    ("refresh-s", float, "seconds between checks for moved tags"),
    ("task-results", int, "maximum number of tasks to remember"),
    ("task-result-bytes", int, "memory for the results of finished tasks together"),
    ("task-result-s", float, "seconds that the result of a finished task is kept"),
    ("drift-rows", int, "rows of a model's last requests that are compared with its training data; 0: off"),
    ("drift-psi", float, "population stability index above which a column is an alarm"),
    ("drift-ks", float, "Kolmogorov-Smirnov distance above which a column of numbers is an alarm"),
    ("drift-s", float, "seconds between comparisons for the metrics and the log"),
    ("payload-s", float, "seconds between writing payloads to the store"),
    ("payload-bytes", int, "maximum payloads of a version in the store; the oldest rows are removed"),
    ("payload-days", float, "days after which payloads are removed from the store"),
    ("drain-s", float, "seconds that running requests get when the server stops"),
)
_OF_SERVER = ("fastapi", "uvicorn", "orjson", "prometheus_client", "sqlalchemy", "starlette", "pydantic")


def add_commands(commands: Any) -> None:
    _add_serve(command(commands, "serve", "serve the models of a store over HTTP", _serve, bucket=False))
    parser = commands.add_parser("keys", help="create, list and remove the API keys of a store")
    _add_keys(parser.add_subparsers(dest="verb", metavar="verb", required=True))
    what = "run the tasks of a broker: predict, fit, scripts"
    add = command(commands, "worker", what, _work, bucket=False)
    add("--broker", metavar="URL", help="redis://host/0 or amqp://user@host// (default: KINDLER_BROKER)")
    label = "take tasks that require this label; repeatable (default: 'default')"
    add("--label", action="append", metavar="NAME", help=label)
    add("--workers", type=int, metavar="N", help="concurrent tasks (default: one per core, up to 4)")
    add("--trusted", action="store_true", help="allow functions and pickles from the store to run")


def _add_serve(add: Callable[..., Any]) -> None:
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port; 0 picks a free one (default: %(default)s)")
    broker = "broker that runs tasks (default: KINDLER_BROKER, or this machine)"
    add("--broker", metavar="URL", help=broker)
    add("--model", help="model that /invocations uses")
    add("--trusted", action="store_true", help="allow models and scripts that can run code from the store")
    alone = "model whose requests are never batched together; repeatable"
    add("--alone", metavar="NAME", action="append", help=alone)
    isolation = "run models in separate processes, or in the server's (default: %(default)s)"
    add("--isolation", choices=["process", "none"], default="process", help=isolation)
    processes = "maximum processes of one model; auto chooses by the cores (default: auto)"
    add("--processes", type=_count, metavar="N", default=None, help=processes)
    device = "where models run: auto, cpu, cuda or cuda:N; NAME=cuda:1 for one model; repeatable"
    add("--device", metavar="[NAME=]DEVICE", action="append", default=[], help=f"{device} (default: auto)")
    for name, kind, text in _LIMITS:
        add(f"--{name}", type=kind, metavar="N", help=text)
    payloads = "append this share of the requests to a dataset of the store; repeatable for single models"
    add(
        "--log-payloads",
        metavar="[MODEL=]SHARE",
        action="append",
        default=[],
        help=f"{payloads} (default: 0)",
    )
    redact = "columns, inputs and outputs that are never logged; repeatable"
    add("--redact-columns", metavar="[MODEL=]NAME,...", action="append", default=[], help=redact)
    grpc = "also serve the Open Inference Protocol over gRPC on this port; 0 picks a free one"
    add("--grpc-port", type=int, metavar="PORT", help=grpc)
    add("--tls-cert", metavar="FILE", help="certificate chain in PEM format, for https")
    add("--tls-key", metavar="FILE", help="its private key in PEM format")
    add("--tls-client-ca", metavar="FILE", help="require client certificates signed by this authority")
    cors = "let web pages of this origin use the server, such as https://shop.example; repeatable"
    add("--cors-origin", dest="cors_origins", metavar="ORIGIN", action="append", help=cors)
    add("--access-log", metavar="FILE", help="write a JSON line per request; - is stderr")
    add("--audit-log", metavar="FILE", help="write a JSON line per change and rejected key; - is stderr")
    level = "lowest level of log lines; a 4xx status is a warning, 5xx an error (default: %(default)s)"
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info", help=level)
    form = "format of the server's own messages on stderr (default: %(default)s)"
    add("--log-format", choices=["text", "json"], default="text", help=form)


def _add_keys(verbs: Any) -> None:
    add = command(verbs, "add", "create a key and print it once", _add, bucket=False)
    scopes = ["read", "predict", "write", "admin"]
    add("--scope", action="append", required=True, choices=scopes, help="what the key allows; repeatable")
    add("--note", default="", help="a note on what it is for")
    add("--days", type=float, help="days until it expires (default: never)")
    add("--bucket", action="append", default=[], metavar="NAME", help="only for this bucket; repeatable")
    for shelf in ("model", "dataset", "script"):
        only = f"restrict the key to {shelf}s matching GLOB (closes unlisted shelves); repeatable"
        add(f"--{shelf}", action="append", default=[], metavar="GLOB", help=only)
    command(verbs, "ls", "list the keys, without their secrets", _list, bucket=False)
    add = command(verbs, "rm", "remove a key", _remove, bucket=False)
    add("id", help="id of the key, as `ls` prints it")


def _count(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _devices(options: list[str]) -> dict[str, Any]:
    """The device of all models, and of single ones; a name may have an equals sign, a device has none."""
    pairs = [text.rpartition("=") for text in options]
    common = [device for _, named, device in pairs if not named]
    if len(common) > 1:
        raise ConfigError(f"--device was set {len(common)} times for all models: {', '.join(common)}.")
    return {
        "device": common[0] if common else "auto",
        "devices": {name: device for name, named, device in pairs if named},
    }


def _payloads(chosen: argparse.Namespace) -> dict[str, Any]:
    """The settings by model; "*" are all models that an option does not name."""
    shares: dict[str, float] = {}
    for model, text in map(_of_model, chosen.log_payloads):
        if model in shares:
            raise ConfigError(f"--log-payloads was set more than once for {model!r} (* is every model).")
        try:
            shares[model] = float(text)
        except ValueError as exc:
            raise ConfigError(f"--log-payloads {text!r}: must be a number from 0 to 1.") from exc
    hidden: dict[str, tuple[str, ...]] = {}
    for model, text in map(_of_model, chosen.redact_columns):
        hidden[model] = (*hidden.get(model, ()), *filter(None, text.split(",")))
    return {"log_payloads": shares, "redact_columns": hidden}


def _of_model(text: str) -> tuple[str, str]:
    model, named, value = text.rpartition("=")
    return (model if named else "*"), value


def _serve(chosen: argparse.Namespace) -> int:
    try:
        from kindler.serve.request_log import configure
        from kindler.serve.server import serve
        from kindler.serve.settings import ServeSettings, Tls
    except ModuleNotFoundError as exc:
        raise _lacking(exc) from exc
    options: dict[str, Any] = {
        field.name: tuple(value) if isinstance(value, list) else value
        for field in fields(ServeSettings)
        if (value := getattr(chosen, field.name, None)) is not None
    }
    settings = ServeSettings(**{**options, **_payloads(chosen), **_devices(chosen.device)})
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
        note = " ".join([*limits, key.note])
        print(f"{key.id}  {' '.join(key.scopes):<24} {key.created:%Y-%m-%d} {until}{over}  {note}".rstrip())
    return 0


def _remove(chosen: argparse.Namespace) -> int:
    _keys(chosen).remove(chosen.id)
    return 0


def _keys(chosen: argparse.Namespace) -> Any:
    try:
        from kindler.store.keys import Keys
        from kindler.store.urls import default_url
    except ModuleNotFoundError as exc:
        raise _lacking(exc) from exc
    return Keys(chosen.store or default_url(os.environ))


def _lacking(error: ModuleNotFoundError) -> Exception:
    package = (error.name or "").partition(".")[0]
    if package not in _OF_SERVER:
        return error
    return MissingExtraError(what="the server", package=package, extra="serve")


def _work(chosen: argparse.Namespace) -> int:
    from kindler.runtime.engine import default_broker
    from kindler.store.urls import default_url

    broker = chosen.broker or default_broker(os.environ)
    if broker is None:
        raise ConfigError("no broker.\nHint: pass --broker redis://host/0, or set KINDLER_BROKER.")
    if chosen.workers is not None and chosen.workers < 1:
        raise ConfigError(f"--workers {chosen.workers}: must be at least 1.")
    try:
        from kindler.runtime.broker_worker import Worker
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "kombu":
            raise
        raise MissingExtraError(what="kindler worker", package="kombu", extra="broker") from exc
    store, labels = chosen.store or default_url(os.environ), chosen.label or ["default"]
    worker = Worker(store, broker, labels=labels, workers=chosen.workers, trusted=chosen.trusted)
    worker.run(lambda line: print(line, flush=True))
    return 0
