"""Kindler: train, score, store and serve deep-learning models where the data already is, in Spark.

Public names load on first use: importing kindler imports no framework and no pyspark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kindler import callbacks as callbacks
    from kindler import cluster as cluster
    from kindler import compat as compat
    from kindler import data as data
    from kindler import errors as errors
    from kindler import features as features
    from kindler import ml as ml
    from kindler import runtime as runtime
    from kindler import serve as serve
    from kindler import store as store
    from kindler import strategies as strategies
    from kindler import testing as testing
    from kindler import tfrecord as tfrecord
    from kindler import tune as tune
    from kindler import types as types
    from kindler.collective import all_gather as all_gather
    from kindler.config import Checkpoints as Checkpoints
    from kindler.config import Columns as Columns
    from kindler.config import Device as Device
    from kindler.config import Epochs as Epochs
    from kindler.config import Optimization as Optimization
    from kindler.config import RunSettings as RunSettings
    from kindler.data.preparation import Prepare as Prepare
    from kindler.data.preparation import batched as batched
    from kindler.data.tables import Table as Table
    from kindler.engine.placement import current_worker as current_worker
    from kindler.estimator.estimator import Estimator as Estimator
    from kindler.readers import read_csv as read_csv
    from kindler.readers import read_images as read_images
    from kindler.readers import read_json as read_json
    from kindler.readers import read_parquet as read_parquet
    from kindler.readers import read_tfrecord as read_tfrecord
    from kindler.spark.session import init as init
    from kindler.spark.session import stop as stop
    from kindler.storage import Store as Store
    from kindler.storage import om as om
    from kindler.train.history import History as History
    from kindler.xshards import SharedValue as SharedValue
    from kindler.xshards import XShards as XShards

__version__ = "0.2.0"


def _by_name(modules: dict[str, str]) -> dict[str, str]:
    return {name: module for module, names in modules.items() for name in names.split()}


_PUBLIC = _by_name(
    {
        "kindler.collective": "all_gather",
        "kindler.config": "Checkpoints Columns Device Epochs Optimization RunSettings",
        "kindler.data.preparation": "Prepare batched",
        "kindler.data.tables": "Table",
        "kindler.engine.placement": "current_worker",
        "kindler.estimator.estimator": "Estimator",
        "kindler.readers": "read_csv read_images read_json read_parquet read_tfrecord",
        "kindler.spark.session": "init stop",
        "kindler.storage": "Store om",
        "kindler.train.history": "History",
        "kindler.xshards": "SharedValue XShards",
    }
)
_SUBMODULES = {
    *("callbacks", "cluster", "compat", "data", "errors", "features", "ml"),
    *("runtime", "serve", "store", "strategies", "testing", "tfrecord", "tune", "types"),
}

__all__ = sorted([*_PUBLIC, "__version__", "errors"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"kindler.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kindler' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
