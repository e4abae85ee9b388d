"""Hyper-parameter search: concurrent trials, each a normal run, chosen and pruned by Optuna.

`search` runs a study; `uniform`, `loguniform`, `integer` and `choice` define what it may choose from.
"""

from __future__ import annotations

from kindler.errors import MissingExtraError

try:
    import optuna  # noqa: F401
except ModuleNotFoundError as exc:
    if exc.name != "optuna":
        raise
    raise MissingExtraError(what="kindler.tune", package="optuna", extra="tune") from exc

from kindler.tune.search import search
from kindler.tune.space import Dimension, choice, integer, loguniform, uniform
from kindler.tune.study import Study

__all__ = ["Dimension", "Study", "choice", "integer", "loguniform", "search", "uniform"]
