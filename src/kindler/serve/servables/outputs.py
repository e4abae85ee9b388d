"""Whatever a model returns, as arrays by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kindler.serve.signature import Arrays

__all__ = ["named"]


def named(returned: Any, names: Sequence[str] = (), convert: Callable[[Any], Any] = np.asarray) -> Arrays:
    """Arrays by name: a mapping's own names, those given, or "output_0", "output_1", ...

    Args:
        returned: One value, a list or tuple of several, or a mapping.
        names: The names of the outputs, if the model has some.
        convert: Makes numpy of one value.
    """
    if isinstance(returned, Mapping):
        return {str(name): convert(value) for name, value in returned.items()}
    if not isinstance(returned, list | tuple):
        return {names[0] if names else "output_0": convert(returned)}
    if len(names) != len(returned):
        names = [f"output_{i}" for i in range(len(returned))]
    return {name: convert(value) for name, value in zip(names, returned, strict=True)}
