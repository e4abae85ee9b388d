"""`fit` and `partial_fit`: a stored model in, its next version out. Runs in the worker.

Keras and PyTorch models and Kindler's estimators are trained by `Estimator`, on processes of the worker's
machine or on Spark; scikit-learn's by their own methods.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.shelves.models import Models
from kindler.store import Version

__all__ = ["session", "train"]

_MAKING = (
    "workers",
    "engine",
    "device",
    "seed",
    "model_dir",
    "log_dir",
    "metrics",
    "config",
    "keras_backend",
)


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
    trainer = _TRAINERS.get(version.kind)
    if trainer is None:
        raise ConfigError(f"{version} is of kind {version.kind!r}, which the runtime cannot train.")
    made, told = trainer(models, version, verb, data, dict(options), trusted)
    return models.put(
        made, version.name, attributes={**version.attributes, **told}, trusted=trusted, **_how_to_put(version)
    )


def _sklearn(
    models: Models, version: Version, verb: str, data: tuple[Any, ...], options: dict[str, Any], trusted: bool
) -> tuple[Any, dict[str, Any]]:
    model = models.get(str(version), trusted=trusted)
    method = getattr(model, verb, None)
    if not callable(method):
        raise ConfigError(f"a {type(model).__qualname__} has no {verb}.")
    method(*data, **options)
    return model, {}


def _keras(
    models: Models, version: Version, verb: str, data: tuple[Any, ...], options: dict[str, Any], trusted: bool
) -> tuple[Any, dict[str, Any]]:
    making, rest = _parted(options)
    estimator = Estimator.from_keras(model=models.get(str(version), trusted=trusted), **making)
    history = estimator.fit(_joined(data), **{"verbose": 0, **rest})
    return estimator.get_model(), {"history": list(history)}


def _torch(
    models: Models, version: Version, verb: str, data: tuple[Any, ...], options: dict[str, Any], trusted: bool
) -> tuple[Any, dict[str, Any]]:
    making, rest = _parted(_torch_parts(options))
    estimator = Estimator.from_torch(model=models.get(str(version), trusted=trusted), **making)
    history = estimator.fit(_joined(data), **{"verbose": 0, **rest})
    return estimator.get_model(), {"history": list(history)}


def _estimator(
    models: Models, version: Version, verb: str, data: tuple[Any, ...], options: dict[str, Any], trusted: bool
) -> tuple[Any, dict[str, Any]]:
    if version.meta["model_kind"] == "torch":
        options = _torch_parts(options)
    making, rest = _parted(options)
    estimator = models.get(str(version), trusted=trusted, **making)
    estimator.fit(_joined(data), **{"verbose": 0, **rest})
    return estimator, {}


_TRAINERS: dict[str, Callable[..., tuple[Any, dict[str, Any]]]] = {
    "sklearn": _sklearn,
    "pickle": _sklearn,
    "keras": _keras,
    "tf_keras": _keras,
    "torch": _torch,
    "estimator": _estimator,
}


def _parted(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an estimator is made with, and what its `fit` takes. One process, unless more are asked for."""
    making = {"workers": 1, "engine": "local"}
    making |= {name: options[name] for name in (*_MAKING, "optimizer", "loss") if name in options}
    return making, {name: value for name, value in options.items() if name not in making}


def _torch_parts(options: dict[str, Any]) -> dict[str, Any]:
    """Optimizer and loss by the names of PyTorch's own classes: objects of them do not travel."""
    options = dict(options)
    rate = options.pop("lr", None)
    for key, module, base in (("optimizer", "torch.optim", "Optimizer"), ("loss", "torch.nn", "Module")):
        named = options.get(key)
        if not isinstance(named, str):
            raise ConfigError(
                f"fit({key}={named!r}): a PyTorch model is trained with the name of a class of {module}.\n"
                "Hint: fit(x, y, optimizer='Adam', lr=1e-3, loss='CrossEntropyLoss', epochs=2)."
            )
        holder = importlib.import_module(module)
        found = getattr(holder, named, None)
        if not (isinstance(found, type) and issubclass(found, getattr(holder, base))):
            raise ConfigError(f"fit({key}={named!r}): {module} has no such class.")
        options[key] = found() if key == "loss" else found
    if rate is not None:
        options["optimizer"] = functools.partial(options["optimizer"], lr=rate)
    return options


def _joined(data: tuple[Any, ...]) -> Any:
    return data[0] if len(data) == 1 else data


def _how_to_put(version: Version) -> dict[str, Any]:
    """What the store must be told again of a PyTorch model whose class is the user's."""
    kind, meta = version.kind, version.meta
    if kind == "estimator":
        kind, meta = meta["model_kind"], meta["model_meta"]
    if kind == "torch" and meta.get("form") == "class":
        return {"init": meta["init"]}
    return {"kind": "pickle"} if kind == "pickle" else {}
