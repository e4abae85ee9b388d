"""A Gluon block: one replica of it on the CPU.

Parameters are called by their place in the block, as `save_parameters` does: Gluon's own names depend on how
many blocks the process has made. Shapes that a block leaves open are those of the first inputs.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from kindler.collective import Array, Batch, Gradients
from kindler.compat.frameworks import loads
from kindler.compat.frameworks.mxnet.library import mx
from kindler.compat.frameworks.mxnet.loaders import adapt
from kindler.compat.frameworks.mxnet.metrics import MetricTallies
from kindler.compat.frameworks.mxnet.spec import (
    MxnetSpec,
    Steps,
    build_loss,
    build_metrics,
    build_model,
    build_optimizer,
    make_spec,
)
from kindler.errors import ConfigError
from kindler.frameworks.base import BaseReplica, packed, unpacked
from kindler.frameworks.contract import Facts, Use, Variables
from kindler.frameworks.state_format import is_packed

_PARAMETER = "parameter "


def preload() -> None:
    """This module imports what is slow."""


class MxnetReplica(BaseReplica):
    """One rank's copy of a block, on the CPU."""

    def __init__(self, spec: MxnetSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self.device = "cpu"
        mx.random.seed(self.seed % 2**31)
        self.model = build_model(spec)
        self._parameters: dict[str, Any] = dict(self.model._collect_params_with_prefix())
        self._draw(0)

    @classmethod
    def make_spec(cls, **options: Any) -> MxnetSpec:
        return make_spec(**options)

    loads = staticmethod(loads)

    @classmethod
    def facts(cls, spec: MxnetSpec) -> Facts:
        """Data may be functions of `(config, kv)`."""
        return Facts(adapt=adapt)

    @classmethod
    def complaints(cls, spec: MxnetSpec, use: Use, value: Any = None) -> list[str]:
        if use in ("train", "judge") and spec.loss_creator is None:
            return ["this needs a loss; pass a loss_creator to Estimator.from_mxnet."]
        return super().complaints(spec, use, value)

    @cached_property
    def loss(self) -> Any:
        return build_loss(self.spec)

    @cached_property
    def steps(self) -> Steps:
        """The optimizer, for the parameters that are trained."""
        trained = self._trained()
        return Steps(build_optimizer(self.spec, dict(enumerate(trained))), trained)

    @property
    def optimizer(self) -> Any:
        return self.steps.optimizer

    @cached_property
    def _tallied(self) -> MetricTallies:
        spec = self.spec
        training = build_metrics(spec.eval_metrics_creator, spec)
        judging = build_metrics(spec.validation_metrics_creator or spec.eval_metrics_creator, spec)
        return MetricTallies(training, judging)

    def expect(self, features: Sequence[Array]) -> None:
        """Give the parameters whose shapes the block leaves open those that these inputs need."""
        if any(p._data is None for p in self._parameters.values()):
            mx.random.seed(self.seed % 2**31)  # the same weights on all ranks
            one = [mx.nd.zeros((1, *array.shape[1:]), dtype=_dtype(array)) for array in features]
            with mx.autograd.pause():
                self.model(*one)
            self._draw(0)

    def names(self) -> list[str]:
        return [name for name, parameter in self._parameters.items() if parameter.grad_req != "null"]

    def variables(self, *groups: str) -> Variables:
        trained = set(self.names())
        values: Variables = {}
        for group in groups or ("parameters", "buffers", "optimizer"):
            if group == "optimizer":
                values[group] = self.steps.variables()
            else:
                chosen = [n for n in self._parameters if (n in trained) == (group == "parameters")]
                values[group] = {name: self._value(self._parameters[name]) for name in chosen}
        return values

    def assign(self, variables: Mapping[str, Mapping[str, Array]]) -> None:
        for group in ("parameters", "buffers"):
            for name, array in variables.get(group, {}).items():
                _assign(self._parameters[name], array)
        if "optimizer" in variables:
            self.steps.load_variables(variables["optimizer"])

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self._draw(epoch)

    def gradients(self, batch: Batch) -> Gradients:
        trained = self._trained()
        if not batch.rows:
            return Gradients([np.zeros(p.shape, p.dtype) for p in trained], 0.0)
        for parameter in trained:
            parameter.zero_grad()
        inputs, labels = _arrays(batch.features), _arrays(batch.labels)
        with mx.autograd.record():
            outputs = self.model(*inputs)
            mean = self._mean_loss(outputs, labels, batch.rows)
        mean.backward()
        self._count(batch, mean, labels, outputs, trains=True)
        self.epoch_rows += batch.rows
        return Gradients([_dense(p.grad()).asnumpy() for p in trained], float(batch.rows))

    def apply(self, gradients: Sequence[Array]) -> None:
        self.steps.apply(gradients)
        self.step += 1

    def pass_step(self) -> None:
        """Let the schedule go on, where others step and this rank has no rows."""
        self.steps.pass_step()
        self.step += 1

    def rates(self) -> list[float]:
        """The optimizer's rate, unless a schedule decides it."""
        return [] if self.optimizer.lr_scheduler is not None else [float(self.optimizer.lr)]

    def set_rates(self, rates: Sequence[float]) -> None:
        for rate in rates[:1]:
            self.optimizer.set_learning_rate(float(rate))

    def learning_rate(self) -> float:
        return float(self.optimizer.learning_rate)

    def eval_step(self, batch: Batch) -> None:
        if batch.rows:
            inputs, labels = _arrays(batch.features), _arrays(batch.labels)
            outputs = self.model(*inputs)
            self._count(batch, self._mean_loss(outputs, labels, batch.rows), labels, outputs, trains=False)

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        return [output.asnumpy() for output in _several(self.model(*_arrays(features)))]

    def _counted(self) -> Any:
        return [self._tallied.rows, self._tallied.sums]

    def _count_on_from(self, counted: Sequence[Any]) -> None:
        self._tallied.load(counted)

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        kept = self._counted()
        self._tallied.load([json.loads(part) for part in tallies])
        figures = {**self._tallied.figures(), "num_samples": self._tallied.rows}
        self._tallied.load([kept])
        return figures

    def running_loss(self) -> float:
        return self._tallied.figures()["loss"]

    def running_metrics(self) -> dict[str, float]:
        return {name: value for name, value in self._tallied.figures().items() if name != "loss"}

    def loss_sums(self) -> tuple[float, float]:
        total, rows = self._tallied.sums.get("loss", [0.0, 0.0])
        return total, rows

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        state = data if is_packed(data) else _repacked(data)
        unshaped = {name for name, parameter in self._parameters.items() if parameter._data is None}
        if unshaped:  # they take the shapes of the state
            groups = unpacked(state)[1].values()
            for name, array in ((n, a) for arrays in groups for n, a in arrays.items() if n in unshaped):
                _assign(self._parameters[name], array)
        super().load_state(state, weights_only_model=weights_only_model)

    def load_local_state(self, data: bytes) -> None:
        super().load_local_state(_repacked_local(data))
        self._draw(self.epoch, self.step)

    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None:
        super().join_local_states([_repacked_local(data) for data in states], size=size)
        self._draw(self.epoch, self.step)

    def save(self, path: str) -> None:
        """A file that `load_parameters` of a block reads."""
        self.model.save_parameters(path)

    def load(self, path: str) -> None:
        """A file that `save_parameters` wrote."""
        try:
            self.model.load_parameters(path, ctx=mx.cpu())
        except (AssertionError, ValueError, mx.MXNetError) as exc:
            raise ConfigError(f"{path} has no parameters of this block: {str(exc).splitlines()[0]}") from exc

    def _trained(self) -> list[Any]:
        return [self._parameters[name] for name in self.names()]

    def _value(self, parameter: Any) -> Array:
        if parameter._data is None:
            raise ConfigError(
                "the shapes of the block's parameters are not known before its first inputs.\n"
                "Hint: give its layers their input sizes, such as Dense(10, in_units=64)."
            )
        return np.array(_dense(parameter.data()).asnumpy())

    def _mean_loss(self, outputs: Any, labels: Sequence[Any], rows: int) -> Any:
        """What Gluon's trainer makes of a loss: its sum, divided by the rows; a single number is a mean."""
        loss = self.loss(*_several(outputs), *labels)
        return loss.sum() / (rows if loss.size > 1 or rows == 1 else 1)

    def _count(self, batch: Batch, mean: Any, labels: Sequence[Any], outputs: Any, *, trains: bool) -> None:
        value = float(mean.asscalar())
        self._tallied.add(value, labels, _several(outputs), batch.rows, trains=trains)

    def _draw(self, *numbers: int) -> None:
        """Let dropout draw by the seed, these numbers and the rank."""
        words = [self.seed % 2**32, self.rank, *numbers]
        mx.random.seed(int(np.random.SeedSequence(words).generate_state(1)[0]) % 2**31)


def _arrays(columns: Sequence[Array]) -> list[Any]:
    return [mx.nd.array(column, dtype=_dtype(column)) for column in columns]


def _dtype(array: Array) -> str:
    """MXNet has no wide integers beside int64, and no booleans that compute."""
    names = {"bool": "uint8", "uint16": "int32", "uint32": "int64", "uint64": "int64", "int16": "int32"}
    name = str(array.dtype.name)
    return names.get(name, name)


def _several(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def _dense(array: Any) -> Any:
    return array if array.stype == "default" else array.tostype("default")


def _assign(parameter: Any, array: Array) -> None:
    value = mx.nd.array(array, dtype=parameter.dtype)
    if parameter._data is None:
        parameter.shape = array.shape
        parameter._finish_deferred_init()
    parameter.set_data(value)


def _repacked_local(data: bytes) -> bytes:
    """A local state; those of earlier versions are JSON."""
    if is_packed(data):
        return data
    fields = json.loads(data)
    buffers = {name: np.array(value) for name, value in fields.pop("buffers").items()}
    fields["tallies"] = json.loads(fields["tallies"])
    return b"".join(packed(fields, {"buffers": buffers}))


def _repacked(data: bytes) -> bytes:
    """A state of before there were groups of variables, which is a file of numpy's."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    fields = {name: int(found.pop(f"kindler.{name}")) for name in ("epoch", "step")}
    model = {n.removeprefix(_PARAMETER): found.pop(n) for n in list(found) if n.startswith(_PARAMETER)}
    return b"".join(packed(fields, {"parameters": model, "optimizer": found}))
