"""The calls of a session that a replica makes, prepared once, and columns as what their placeholders take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from tensorflow.core.protobuf import config_pb2

from kindler.collective import Array
from kindler.compat.frameworks.tf_graph.ends import Ends, Port, Training
from kindler.errors import ConfigError, DataError

Call = Callable[..., list[Any]]


class Calls:
    """Each is a function of arrays in a fixed order; see the properties.

    Args:
        sess: The session.
        ends: What is fed and fetched.
        inputs: The placeholders of features, in the order of their arrays.
        labels: The same for labels.

    Attributes:
        epoch: The number of the epoch, fed where a learning rate depends on it.
        draw: What random operations draw from in the next call.
    """

    def __init__(self, sess: Any, ends: Ends, *, inputs: Sequence[str], labels: Sequence[str]) -> None:
        self._sess, self._ends = sess, ends
        self._inputs, self._labels = list(inputs), list(labels)
        self._constants = [name for name, _, _ in ends.values]
        self._for_training = self._typed([value for _, value, _ in ends.values])
        self._otherwise = self._typed([value for _, _, value in ends.values])
        self.epoch = 0
        self.draw: Array = np.zeros(2, np.int64)

    def _typed(self, values: Sequence[Any]) -> list[Array]:
        """Constants as their placeholders take them: the calls below convert nothing."""
        tensors = [self._sess.graph.get_tensor_by_name(name) for name in self._constants]
        return [
            np.asarray(value, tensor.dtype.base_dtype.as_numpy_dtype)
            for value, tensor in zip(values, tensors, strict=True)
        ]

    @property
    def judged(self) -> list[str]:
        """What is fetched to judge a batch: the loss, and metrics that are means."""
        return [name for name in (self._ends.loss, *(port.tensor for port in self._ends.metrics)) if name]

    @property
    def _streams(self) -> list[str]:
        return [metric.update for metric in self._ends.streamed]

    @cached_property
    def step(self) -> Call:
        """(rows) a whole step: what was judged."""
        training = self._training
        fetched = [
            *self.judged,
            *self._ops(training.updates),
            *self._ops(self._streams),
            *self._ops(training.apply),
        ]
        return self._made(fetched, self._rows, self._for_training, epoch=training.epoch)

    @cached_property
    def gradients(self) -> Call:
        """(rows) what was judged, then every gradient, then the indices of those that have some."""
        training = self._training
        fetched = [
            *self.judged,
            *(parameter.gradient for parameter in training.parameters),
            *(parameter.indices for parameter in training.parameters if parameter.indices),
            *self._ops(training.updates),
            *self._ops(self._streams),
        ]
        return self._made(fetched, self._rows, self._for_training)

    @cached_property
    def apply(self) -> Call:
        """(gradients and indices, as `gradients` gives them) nothing."""
        training = self._training
        fed = [parameter.gradient for parameter in training.parameters]
        fed += [parameter.indices for parameter in training.parameters if parameter.indices]
        return self._made(self._ops(training.apply), fed, self._for_training, epoch=training.epoch)

    @cached_property
    def judge(self) -> Call:
        """(rows) what was judged."""
        return self._made([*self.judged, *self._ops(self._streams)], self._rows, self._otherwise)

    @cached_property
    def predict(self) -> Call:
        """(features) the outputs."""
        return self._made([port.tensor for port in self._ends.outputs], self._inputs, self._otherwise)

    @cached_property
    def results(self) -> Call:
        """() the results of metrics that count in variables."""
        return self._made([metric.value for metric in self._ends.streamed], [], self._otherwise)

    @cached_property
    def rate(self) -> Call:
        """() the learning rate."""
        training = self._training
        return self._made([training.rate], [], self._for_training, epoch=training.epoch)

    @property
    def _training(self) -> Training:
        assert self._ends.training is not None, "a graph without an optimizer is not trained"
        return self._ends.training

    @property
    def _rows(self) -> list[str]:
        return [*self._inputs, *self._labels]

    def _ops(self, names: Sequence[str]) -> list[Any]:
        return [self._sess.graph.as_graph_element(name) for name in names]

    def _made(
        self, fetched: Sequence[Any], fed: Sequence[str], constants: list[Array], *, epoch: str = ""
    ) -> Call:
        """A function of the arrays for `fed`."""
        graph, draws = self._sess.graph, self._ends.draws
        names = [*self._constants, *filter(None, [epoch, draws]), *fed]
        tensors = [item for item in fetched if isinstance(item, str)]
        if set(tensors) & set(names) or len(set(tensors)) < len(tensors):
            elements = [graph.as_graph_element(item) if isinstance(item, str) else item for item in fetched]
            call = self._sess.make_callable(elements, [graph.as_graph_element(name) for name in names])
        else:
            # Where something is fed, `make_callable` looks everything up again in each call, which takes
            # longer than a small step does.
            targets = [getattr(item, "op", item).name for item in fetched if not isinstance(item, str)]
            options = config_pb2.CallableOptions(feed=names, fetch=tensors, target=targets)
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
        shape = tensor.shape
        self.shape: tuple[int | None, ...] | None = None
        if shape.rank is not None:
            self.shape = tuple(shape.as_list())[1:]

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
