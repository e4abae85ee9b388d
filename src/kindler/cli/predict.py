"""`kindler predict`: with a stored model, in this process or through a server."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kindler.cli.store import NAMES, command, opened
from kindler.errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    from kindler.cli.files import Rows

_FORMATS = ("csv", "json", "jsonl", "parquet", "npy", "npz")
_METHODS = ("predict", "predict_proba", "transform", "decision_function")
_COLUMN = "prediction"
_ARROW = "application/vnd.apache.arrow.stream"


def add_commands(commands: Any) -> None:
    add = command(commands, "predict", "predict the rows of a file with a stored model", _predict)
    add("name", metavar="NAME", help=f"the model: {NAMES}")
    rows = "a .csv, .parquet, .json, .jsonl, .npy or .npz file; - reads standard input"
    add("--input", required=True, metavar="FILE", help=rows)
    result = "a .json, .csv, .jsonl, .parquet, .npy or .npz file; tables also get the columns of the input"
    add("--output", default="-", metavar="FILE", help=f"{result}; - prints JSON (default)")
    add("--format", choices=_FORMATS, help="format of the input, if its name has no known extension")
    method = "method of the model to call (default: %(default)s)"
    add("--method", choices=_METHODS, default="predict", help=method)
    add("--url", help="send the rows to this server instead of loading the model here")
    add("--key", help="API key for the server (default: KINDLER_KEY)")
    timeout = "seconds to wait for the server (default: %(default)g)"
    add("--timeout-s", type=float, default=60.0, metavar="N", help=timeout)
    add("--trusted", action="store_true", help="allow models that can run code when they are loaded")


def _predict(chosen: argparse.Namespace) -> int:
    from kindler.cli.files import read_rows, write

    rows = read_rows(chosen.input, chosen.format)
    outputs = _requested(chosen, rows) if chosen.url else _computed(chosen, rows)
    target = None if chosen.output == "-" else Path(chosen.output)
    write(_shaped(outputs, rows, target), target)
    return 0


def _computed(chosen: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    from kindler.models.arrow_columns import columns_of
    from kindler.models.loaded import load
    from kindler.models.signature import fit, from_columns

    models = opened(chosen).models
    predictor = load(models.store, models.metadata(chosen.name), trusted=chosen.trusted).predictor
    if chosen.method not in predictor.methods:
        raise ConfigError(
            f"{chosen.name} has no method {chosen.method}; available: {', '.join(predictor.methods)}."
        )
    signature = predictor.signature
    inputs = rows if isinstance(rows, dict) else from_columns(signature, columns_of(rows))
    return predictor.call(fit(signature, inputs), chosen.method)


def _requested(chosen: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """The server's outputs; Arrow in both directions, so that no value is rounded."""
    from urllib import error, parse, request

    import pyarrow as pa

    from kindler.cli.files import as_columns
    from kindler.data.arrow import stream
    from kindler.models.arrow_columns import columns_of

    key = chosen.key or os.environ.get("KINDLER_KEY")
    headers = {"content-type": _ARROW, "accept": _ARROW} | ({"authorization": f"Bearer {key}"} if key else {})
    query = parse.urlencode({"bucket": chosen.bucket})
    name = parse.quote(chosen.name, safe="/@^")
    url = f"{chosen.url.rstrip('/')}/api/v1/model/{name}/{chosen.method}?{query}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {chosen.url}: must start with http:// or https://.")
    body = stream(as_columns(rows) if isinstance(rows, dict) else rows)
    sent = request.Request(url, body, headers, method="PUT")
    try:
        with request.urlopen(sent, timeout=chosen.timeout_s) as reply:
            return columns_of(pa.ipc.open_stream(reply.read()).read_all())
    except pa.ArrowException as exc:
        raise DataError(f"{chosen.url} did not return an Arrow stream: {first_line(exc)}.") from exc
    except error.HTTPError as exc:
        raise ConfigError(f"{chosen.url} returned {exc.code}: {_message(exc.read())}") from exc
    except (error.URLError, TimeoutError) as exc:
        reason = getattr(exc, "reason", exc)
        raise ConfigError(f"{chosen.url} cannot be reached: {reason}.") from exc


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:300]


def _shaped(outputs: dict[str, Any], rows: Rows, target: Path | None) -> Any:
    """The value to write: the outputs, and in a table the input's columns too."""
    from kindler.cli.files import as_columns

    kind = "json" if target is None else target.suffix.lower().removeprefix(".")
    only = next(iter(outputs.values())) if len(outputs) == 1 else None
    if kind == "json":
        return {"predictions": outputs if only is None else only}
    if kind == "npy":
        return outputs if only is None else only
    named = outputs if only is None else {_COLUMN: only}
    if kind == "npz":
        return named
    predictions = as_columns(named)
    if isinstance(rows, dict):
        return predictions
    for name in predictions.column_names:
        if name in rows.column_names:
            raise ConfigError(
                f"the input already has a column {name!r}.\nHint: .json output holds only the predictions."
            )
        rows = rows.append_column(name, predictions.column(name))
    return rows
