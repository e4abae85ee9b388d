"""`kindler predict`: with a stored model, in this process or through a server."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib import error, parse, request

from kindler.cli.opened_store import add_store, opened
from kindler.errors import ConfigError, DataError, MissingExtraError
from kindler.serve.http_errors import Problem

if TYPE_CHECKING:
    from kindler.cli.files import Rows

_FORMATS = ("csv", "json", "jsonl", "parquet", "npy", "npz")
_METHODS = ("predict", "predict_proba", "transform", "decision_function")
_COLUMN = "prediction"


def add_commands(commands: Any) -> None:
    """Add `kindler predict`."""
    parser = commands.add_parser("predict", help="predict the rows of a file with a stored model")
    parser.add_argument(
        "name",
        metavar="NAME",
        help="the model, or one of its versions: NAME@3, NAME@tag, NAME^ (the one before the newest)",
    )
    parser.add_argument(
        "--input", required=True, metavar="FILE",
        help="a .csv, .parquet, .json, .jsonl, .npy or .npz file; - reads standard input",
    )  # fmt: skip
    parser.add_argument(
        "--output", default="-", metavar="FILE",
        help="a .json, .csv, .jsonl, .parquet, .npy or .npz file; tables also get the columns of the input;"
        " - prints JSON (default)",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=_FORMATS, help="format of the input, if its name has no known extension"
    )
    parser.add_argument(
        "--method",
        choices=_METHODS,
        default="predict",
        help="method of the model to call (default: %(default)s)",
    )
    parser.add_argument("--url", help="send the rows to this server instead of loading the model here")
    parser.add_argument("--key", help="API key for the server (default: KINDLER_KEY)")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=60.0,
        metavar="N",
        help="seconds to wait for the server (default: %(default)g)",
    )
    parser.add_argument(
        "--trusted", action="store_true", help="allow models that can run code when they are loaded"
    )
    add_store(parser)
    parser.set_defaults(run=_predict)


def _predict(chosen: argparse.Namespace) -> int:
    try:
        from kindler.cli.files import read_rows, write

        rows = read_rows(chosen.input, chosen.format)
        outputs = _asked(chosen, rows) if chosen.url else _computed(chosen, rows)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "orjson":
            raise
        raise MissingExtraError(what="kindler predict", package="orjson", extra="serve") from exc
    except Problem as exc:
        raise DataError(exc.message) from exc
    target = None if chosen.output == "-" else Path(chosen.output)
    write(_shaped(outputs, rows, target), target)
    return 0


def _computed(chosen: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    from kindler.models.loaded import load
    from kindler.models.signature import fit, from_columns

    models = opened(chosen).models
    predictor = load(models.store, models.metadata(chosen.name), trusted=chosen.trusted).predictor
    if chosen.method not in predictor.methods:
        raise ConfigError(
            f"{chosen.name} has no method {chosen.method}; available: {', '.join(predictor.methods)}."
        )
    signature = predictor.signature
    inputs = rows.arrays if rows.table is None else from_columns(signature, rows.arrays)
    return predictor.call(fit(signature, inputs), chosen.method)


def _asked(chosen: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """Ask the server; Arrow in both directions, so that no value is rounded."""
    from kindler.serve.protocols.tables import ARROW, from_arrow

    key = chosen.key or os.environ.get("KINDLER_KEY")
    headers = {"content-type": ARROW, "accept": ARROW} | ({"authorization": f"Bearer {key}"} if key else {})
    query = parse.urlencode({"bucket": chosen.bucket})
    name = parse.quote(chosen.name, safe="/@^")
    url = f"{chosen.url.rstrip('/')}/api/v1/model/{name}/{chosen.method}?{query}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {chosen.url}: must start with http:// or https://.")
    sent = request.Request(url, _streamed(rows), headers, method="PUT")
    try:
        with request.urlopen(sent, timeout=chosen.timeout_s) as reply:
            return from_arrow(reply.read())
    except error.HTTPError as exc:
        raise ConfigError(f"{chosen.url} returned {exc.code}: {_message(exc.read())}") from exc
    except (error.URLError, TimeoutError) as exc:
        reason = getattr(exc, "reason", exc)
        raise ConfigError(f"{chosen.url} cannot be reached: {reason}.") from exc


def _streamed(rows: Rows) -> bytes:
    from kindler.cli.files import as_columns
    from kindler.data.arrow import stream

    return stream(rows.table if rows.table is not None else as_columns(rows.arrays))


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:300]


def _shaped(outputs: dict[str, Any], rows: Rows, target: Path | None) -> Any:
    """The value to write: the outputs, and in a table the input's columns too."""
    one = len(outputs) == 1
    only = next(iter(outputs.values()))
    kind = "json" if target is None else target.suffix.lower().removeprefix(".")
    if kind == "json":
        return {"predictions": only if one else outputs}
    if kind == "npy":
        return only if one else outputs
    if kind == "npz":
        return {_COLUMN: only} if one else outputs
    return _joined({_COLUMN: only} if one else outputs, rows)


def _joined(outputs: dict[str, Any], rows: Rows) -> Any:
    from kindler.cli.files import as_columns

    predictions = as_columns(outputs)
    if rows.table is None:
        return predictions
    table = rows.table
    for name in predictions.column_names:
        if name in table.column_names:
            raise ConfigError(
                f"the input already has a column {name!r}.\nHint: .json output holds only the predictions."
            )
        table = table.append_column(name, predictions.column(name))
    return table
