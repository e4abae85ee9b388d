"""The calls of a session that a replica makes, prepared once, and columns as what their placeholders take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tensorflow.core.protobuf import config_pb2

from kindler.collective import Array
from kindler.compat.frameworks.tf_graph.ends import Ends, Port, op_of
from kindler.errors import ConfigError, DataError

Call = Callable[..., list[Any]]


class Calls:
    """Each is a function of arrays in a fixed order; see `_plan`.

    Attributes:
        epoch: The number of the epoch, fed where a learning rate depends on it.
        draw: What random operations draw from in the next call.
    """

    def __init__(self, sess: Any, ends: Ends, *, inputs: Sequence[str], labels: Sequence[str]) -> None:
        self._sess, self._ends = sess, ends
        self._inputs, self._rows = list(inputs), [*inputs, *labels]
        tensors = [sess.graph.get_tensor_by_name(name) for name in ends.constants]
        types = [tensor.dtype.base_dtype.as_numpy_dtype for tensor in tensors]
        self._constants = {  # as their placeholders take them: the calls below convert nothing
            trains: [np.asarray(v[1 if trains else 2], t) for v, t in zip(ends.values, types, strict=True)]
            for trains in (True, False)
        }
        self.epoch = 0
        self.draw: Array = np.zeros(2, np.int64)
        # What is fetched to judge a batch: the loss, and metrics that are means.
        self.judged = [name for name in (ends.loss, *(port.tensor for port in ends.metrics)) if name]
        self._made: dict[str, Call] = {}

    def __call__(self, kind: str, *arrays: Any) -> list[Any]:
        if kind not in self._made:
            self._made[kind] = self._make(*self._plan(kind))
        return self._made[kind](*arrays)

    def _plan(self, kind: str) -> tuple[list[str], list[str], list[str], bool, bool]:
        """What is fetched, what runs besides, what is fed, whether it trains, and whether it has an epoch."""
        ends, judged, rows = self._ends, self.judged, self._rows
        streams = [metric.update for metric in ends.streamed]
        if kind == "judge":
            return judged, streams, rows, False, False
        if kind == "predict":
            return [port.tensor for port in ends.outputs], [], self._inputs, False, False
        if kind == "results":  # of metrics that count in variables
            return [metric.value for metric in ends.streamed], [], [], False, False
        training = ends.training
        assert training is not None, "a graph without an optimizer is not trained"
        updates = [*training.updates, *streams]
        if kind == "gradients":
            return [*judged, *training.fed], updates, rows, True, False
        if kind == "apply":
            return [], list(training.apply), training.fed, True, True
        if kind == "rate":
            return [training.rate], [], [], True, True
        return judged, [*updates, *training.apply], rows, True, True  # a whole step

    def _make(self, tensors: list[str], ops: list[str], fed: list[str], trains: bool, in_epoch: bool) -> Call:
        graph, draws, constants = self._sess.graph, self._ends.draws, self._constants[trains]
        epoch = self._ends.training.epoch if in_epoch and self._ends.training is not None else ""
        names = [*self._ends.constants, *filter(None, [epoch, draws]), *fed]
        targets = [graph.as_graph_element(name) for name in ops]
        if set(tensors) & set(names) or len(set(tensors)) < len(tensors):
            elements = [*map(graph.as_graph_element, tensors), *targets]
            call = self._sess.make_callable(elements, [graph.as_graph_element(name) for name in names])
        else:
            # Where something is fed, `make_callable` looks everything up again in each call, which takes
            # longer than a small step does.
            target_names = [op_of(target).name for target in targets]
            options = config_pb2.CallableOptions(feed=names, fetch=tensors, target=target_names)
            call = self._sess._make_callable_from_options(options)

        def with_constants(*arrays: Any) -> list[Any]:
            more = [np.asarray(self.epoch, np.int64)] if epoch else []
            more += [self.draw] if draws else []
            results: list[Any] = call(*constants, *more, *arrays)
            return results

        return with_constants


Where = Callable[[int], "int | str"]


class Feed:
    """One placeholder."""

    def __init__(self, tensor: Any, column: str) -> None:
        self.name, self.column = str(tensor.name), column
        self.dtype = np.dtype(tensor.dtype.base_dtype.as_numpy_dtype)
        known = tensor.shape.rank is not None
        self.shape: tuple[int | None, ...] | None = tuple(tensor.shape.as_list())[1:] if known else None

    def array(self, values: Array, where: Where | None = None) -> Array:
        """The column's rows, as the placeholder takes them."""
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
            "Hint: shapes={...} of fit sets the shape of a column's rows.",
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
                place = int(bad.reshape(-1).argmax())
                row = place // max(1, bad.size // len(bad))
                raise DataError(
                    f"is {values.reshape(-1)[place]}, which {self.dtype.name} cannot represent; the "
                    f"placeholder"
                    f" {self.name!r} takes {self.dtype.name}.",
                    column=self.column or None,
                    row=row if where is None else where(row),
                )
            return cast
        return values.astype(self.dtype)


class Feeds:
    """The placeholders of all columns of one role."""

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
        self.tensors = [feed.name for feed in self._feeds]  # names of the placeholders

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

    ranks = [part.shape.rank for part in tf.nest.flatten(spec) if hasattr(part, "shape")]
    wanted = [graph.get_tensor_by_name(name).shape.rank for name in ends.rows]
    if None in ranks or None in wanted or [rank + 1 for rank in ranks] != wanted:
        return []
    return ["the elements of this tf.data.Dataset are rows, not batches of them.\nHint: dataset.batch(n)."]


def _fits(row: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(row) == len(wanted) and all(n in (None, m) for m, n in zip(row, wanted, strict=True))


def _shown(shape: Sequence[int | None]) -> str:
    inner = ", ".join("any" if n is None else str(n) for n in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"
