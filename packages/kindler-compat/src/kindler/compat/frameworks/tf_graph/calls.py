"""The calls of a session that a replica makes, prepared once, because looking names up costs time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from tensorflow.core.protobuf import config_pb2

from kindler.collective import Array
from kindler.compat.frameworks.tf_graph.ends import Ends, Training

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
