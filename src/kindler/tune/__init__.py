"""Hyper-parameter search: trials side by side, each a normal run, chosen and cut short by Optuna.

`search` runs a study; `uniform`, `loguniform`, `integer` and `choice` say what it may choose from.
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
