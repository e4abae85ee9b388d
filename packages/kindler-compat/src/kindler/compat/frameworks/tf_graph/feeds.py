"""Columns of a batch as what placeholders take: their dtypes and shapes, without changing a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kindler.collective import Array
from kindler.compat.frameworks.tf_graph.ends import Ends, Port
from kindler.errors import ConfigError, DataError

Where = Callable[[int], "int | str"]


class Feed:
    """One placeholder.

    Args:
        tensor: The tensor that is fed.
        column: What the data calls it, for complaints.
    """

    def __init__(self, tensor: Any, column: str) -> None:
        self.name, self.column = str(tensor.name), column
        self.dtype = np.dtype(tensor.dtype.base_dtype.as_numpy_dtype)
        shape = tensor.shape
        self.shape: tuple[int | None, ...] | None = None
        if shape.rank is not None:
            self.shape = tuple(shape.as_list())[1:]

    def array(self, values: Array, where: Where | None = None) -> Array:
        """The column's rows, as the placeholder takes them.

        Raises:
            DataError: A row has another shape, or a value that the placeholder's dtype does not have.
        """
        return self._typed(self._shaped(values), where)

    def _shaped(self, values: Array) -> Array:
        wanted, row = self.shape, values.shape[1:]
        if wanted is None or _fits(row, wanted):
            return values
        size = int(np.prod(row, dtype=np.int64))
        known = [n for n in wanted if n is not None]
        # (n, 1) for (n,) and back, and a flat vector for an image: nothing else is guessed.
        flat = len(row) <= 1 or not wanted
        if flat and len(known) == len(wanted) and size == int(np.prod(known, dtype=np.int64)):
            return values.reshape(len(values), *known)
        raise DataError(
            f"has rows of the shape {tuple(row)}; the placeholder {self.name!r} takes {_shown(wanted)}.\n"
            "Hint: shapes={...} of fit says what shape the rows of a column have.",
            column=self.column or None,
        )

    def _typed(self, values: Array, where: Where | None) -> Array:
        if values.dtype == self.dtype:
            return values
        if self.dtype.kind in "iub" and not np.can_cast(values.dtype, self.dtype, "safe"):
            with np.errstate(invalid="ignore", over="ignore"):
                cast = values.astype(self.dtype)
            bad = cast.astype(values.dtype) != values
            if bad.any():
                self._refuse(values, bad, where)
            return cast
        return values.astype(self.dtype)

    def _refuse(self, values: Array, bad: Array, where: Where | None) -> None:
        place = int(bad.reshape(-1).argmax())
        row = place // max(1, bad.size // len(bad))
        raise DataError(
            f"is {values.reshape(-1)[place]}, which {self.dtype.name} does not have; the placeholder"
            f" {self.name!r} takes {self.dtype.name}.",
            column=self.column or None,
            row=row if where is None else where(row),
        )


class Feeds:
    """The placeholders of all columns of one role.

    Args:
        graph: The graph.
        ports: The placeholders.
        names: The data's columns, in the order in which batches have them.
        named: Whether the placeholders have names: columns of those names go to them, in any order.
        what: "inputs" or "labels".

    Raises:
        ConfigError: There are not as many columns as placeholders.
    """

    def __init__(
        self, graph: Any, ports: Sequence[Port], names: Sequence[str], *, named: bool, what: str
    ) -> None:
        order = list(range(len(ports)))
        if names:
            if len(names) != len(ports):
                raise ConfigError(
                    f"the graph has {len(ports)} {what} ({', '.join(port.tensor for port in ports)}), and the"
                    f" data has {len(names)} columns for them: {', '.join(names)}.\n"
                    f"Hint: {'feature_cols' if what == 'inputs' else 'label_cols'}=[...] names one column for"
                    " each, in their order."
                )
            if named and {port.name for port in ports} == set(names):
                order = [list(names).index(port.name) for port in ports]
        self._order = order
        columns = [names[place] if names else port.name for place, port in zip(order, ports, strict=True)]
        self._feeds = [
            Feed(graph.get_tensor_by_name(port.tensor), column)
            for port, column in zip(ports, columns, strict=True)
        ]

    @property
    def tensors(self) -> list[str]:
        """Names of the placeholders."""
        return [feed.name for feed in self._feeds]

    def arrays(self, columns: Sequence[Array], where: Where | None = None) -> list[Array]:
        """What the placeholders are fed with, in the order of `tensors`."""
        if len(columns) != len(self._feeds):
            raise ConfigError(
                f"the graph takes {len(self._feeds)} columns ({', '.join(self.tensors)}); received"
                f" {len(columns)}."
            )
        pairs = zip(self._feeds, self._order, strict=True)
        return [feed.array(columns[place], where) for feed, place in pairs]


def unbatched(graph: Any, ends: Ends, data: Any) -> list[str]:
    """A complaint about a `tf.data.Dataset` whose elements are single rows; none about other data."""
    spec = getattr(data, "element_spec", None)
    if spec is None:
        return []
    import tensorflow as tf

    given = [part.shape.rank for part in tf.nest.flatten(spec) if hasattr(part, "shape")]
    ports = (*ends.inputs, *ends.labels)
    wanted = [graph.get_tensor_by_name(port.tensor).shape.rank for port in ports]
    if len(given) != len(wanted) or None in given or None in wanted:
        return []
    if all(mine + 1 == theirs for mine, theirs in zip(given, wanted, strict=True)):
        return [
            "the elements of this tf.data.Dataset are rows, not batches of them.\nHint: dataset.batch(n)."
        ]
    return []


def _fits(row: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(row) == len(wanted) and all(n in (None, m) for m, n in zip(row, wanted, strict=True))


def _shown(shape: Sequence[int | None]) -> str:
    inner = ", ".join("any" if n is None else str(n) for n in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"
