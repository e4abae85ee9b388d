"""MXNet itself, which needs names that numpy has removed since.

They are put back in this process before MXNet is imported here. A program that imports MXNet itself imports
this module first.
"""

from __future__ import annotations

import builtins
import importlib
import warnings
from typing import Any, NoReturn

import numpy as np

__all__ = ["mx", "put_back"]


def _gone(*args: Any, **options: Any) -> NoReturn:
    raise NotImplementedError("numpy has no financial functions any more; see the package numpy_financial.")


# What each was called for in numpy before 2, by the name it had there.
_ALIASES: dict[str, Any] = {
    **{name: getattr(builtins, name) for name in ("bool", "int", "float", "complex", "object", "str")},
    "float_": np.float64,
    "unicode_": np.str_,
    "PZERO": 0.0,
    "NZERO": -0.0,
    "PINF": np.inf,
    "NINF": -np.inf,
    "Inf": np.inf,
    "NAN": np.nan,
    "NaN": np.nan,
    "alltrue": np.all,
    "sometrue": np.any,
    "product": np.prod,
    "cumproduct": np.cumprod,
    "row_stack": np.vstack,
    "round_": np.round,
    "in1d": lambda *arrays, **options: np.isin(*arrays, **options).ravel(),
    "msort": lambda array: np.sort(array, axis=0),
    "trapz": getattr(np, "trapezoid", None),
    **dict.fromkeys(("mirr", "npv", "pmt", "ppmt", "pv", "rate"), _gone),
}


def put_back() -> None:
    """Give numpy the names that it lacks; those it has stay what they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of some when they are asked for
        for name, value in _ALIASES.items():
            if value is not None and not hasattr(np, name):
                setattr(np, name, value)


def _imported() -> Any:
    put_back()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("mxnet")
        except OSError as exc:
            raise ImportError(
                f"MXNet is installed but cannot be loaded on this machine: {exc}.\n"
                "Hint: its wheel for ARM processors needs Arm Performance Libraries; for x86-64 it does not."
            ) from exc


mx: Any = _imported()
