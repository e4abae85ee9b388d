"""`fit` and `partial_fit`: a stored model in, its next version out. Runs in the worker.

How a model is trained is for its kind to say.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kindler.errors import ConfigError
from kindler.models.registry import MODEL_KINDS
from kindler.shelves.models import Models
from kindler.store import Version


def session(options: dict[str, Any]) -> Any:
    """The Spark session of a fit with `engine="spark"`, else None; takes its own options out of `options`.

    Args:
        options: Those of the fit; `spark` may be a dict of arguments for `kindler.init`.
    """
    wanted = options.pop("spark", None)
    if options.get("engine") != "spark":
        if wanted is not None:
            raise ConfigError("fit(spark=...) goes with engine='spark'.")
        return None
    from kindler.spark.session import init

    return init(**(wanted or {}))


def train(
    models: Models,
    version: Version,
    verb: str,
    data: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    trusted: bool,
) -> Version:
    """Train a version and publish what came of it as the newest one.

    Args:
        models: The shelf.
        version: Which version to go on from.
        verb: "fit" or "partial_fit".
        data: The data, and the labels if they are apart.
        options: What is known to the method that trains.
        trusted: Whether the model may be, or hold, code.

    Raises:
        ConfigError: Models of this kind cannot be trained, or an option cannot work.
    """
    if not data:
        raise ConfigError(f"{verb}() of {version} needs data, or the name of a dataset.")
    kind = MODEL_KINDS.model_kind(version.kind)
    read = functools.partial(models.get, str(version), trusted=trusted)
    model, attributes = kind.train(read, version.meta, verb, data, dict(options))
    return models.put(
        model,
        version.name,
        attributes={**version.attributes, **attributes},
        trusted=trusted,
        **kind.put_again(version.meta),
    )
