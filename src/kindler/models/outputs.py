"""Whatever a model returns, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kindler.models.signature import Arrays


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


def plain(outputs: Any) -> Any:
    """Tensors as arrays, however they are nested."""
    if isinstance(outputs, Mapping):
        return {str(key): plain(value) for key, value in outputs.items()}
    if isinstance(outputs, list | tuple):
        return type(outputs)(plain(value) for value in outputs)
    if hasattr(outputs, "detach"):
        return outputs.detach().cpu().numpy()
    return outputs.numpy() if hasattr(outputs, "numpy") and not isinstance(outputs, np.ndarray) else outputs
