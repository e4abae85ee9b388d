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

from kindler.collective import Array, Collective, Gradients
from kindler.compat.frameworks import loads
from kindler.compat.frameworks.mxnet.library import mx
from kindler.compat.frameworks.mxnet.loaders import adapt
from kindler.compat.frameworks.mxnet.metrics import MetricTallies
from kindler.compat.frameworks.mxnet.optimizer import Steps
from kindler.compat.frameworks.mxnet.spec import (
    MxnetSpec,
    build_loss,
    build_metrics,
    build_model,
    build_optimizer,
    make_spec,
)
from kindler.errors import ConfigError
from kindler.frameworks.base import BaseReplica
from kindler.frameworks.contract import Batch
from kindler.frameworks.rng import own_states, restore_own, seed_own

_PARAMETER = "parameter "


def preload() -> None:
    """This module imports what is slow."""


class MxnetReplica(BaseReplica):
    """One rank's copy of a block; keeps the contracts `DriverModel` and `Stepper`.

    Args:
        spec: The creators.
        device: Where to compute: the CPU.
        rank: This rank.
        local_rank: Its number on its host.
        seed: Decides the initial weights; `config["seed"]` comes first.
        threads: Decided by the environment of the process.
        feature_names: Not needed: inputs are positional.
        label_names: Not needed.
        label_shapes: Not needed: a loss is a mean over rows.
    """

    def __init__(
        self,
        spec: MxnetSpec,
        *,
        device: str = "cpu",
        rank: int = 0,
        local_rank: int = 0,
        seed: int = 0,
        threads: int | None = None,
        feature_names: Sequence[str] = (),
        label_names: Sequence[str] = (),
        label_shapes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(spec, device=device, rank=rank, seed=seed)
        self.device = "cpu"
        mx.random.seed(seed % 2**31)
        self.model = build_model(spec)
        self._parameters: dict[str, Any] = dict(self.model._collect_params_with_prefix())
        self._collective: Collective | None = None
        self._epoch_rows = 0
        self._draw(0)

    @classmethod
    def make_spec(cls, **options: Any) -> MxnetSpec:
        """A spec of the arguments of `Estimator.from_mxnet`."""
        return make_spec(**options)

    @classmethod
    def loads(cls, data: bytes) -> Any:
        """What `dumps` packed."""
        return loads(data)

    @classmethod
    def as_data(cls, spec: MxnetSpec, data: Any) -> Any:
        """Functions of `(config, kv)`."""
        return adapt(data)

    @classmethod
    def lacking(cls, spec: MxnetSpec, *names: str) -> list[str]:
        """A loss to train with and to judge by."""
        lacks = "loss" in names and spec.loss_creator is None
        return ["this needs a loss; give Estimator.from_mxnet a loss_creator."] if lacks else []

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
        """What callbacks see."""
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
        """The trained parameters."""
        return [name for name, parameter in self._parameters.items() if parameter.grad_req != "null"]

    def read(self) -> list[Array]:
        """Copies of the trained parameters."""
        return [self._value(self._parameters[name]) for name in self.names()]

    def write(self, arrays: Sequence[Array]) -> None:
        """Overwrite the trained parameters."""
        for parameter, array in zip(self._trained(), arrays, strict=True):
            _assign(parameter, array)

    def join(self, collective: Collective) -> None:
        """Start from rank 0's state."""
        self._collective = collective
        super().join(collective)

    def begin_epoch(self, epoch: int) -> None:
        """Randomness depends on the epoch and the rank."""
        super().begin_epoch(epoch)
        self._epoch_rows = 0
        self._draw(epoch)

    def gradients(self, batch: Batch) -> Gradients:
        """The gradient of the mean loss over these rows."""
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
        self._epoch_rows += batch.rows
        return Gradients([_dense(p.grad()).asnumpy() for p in trained], float(batch.rows))

    def apply(self, gradients: Sequence[Array]) -> None:
        """One step of the optimizer."""
        self.steps.apply(gradients)
        self.step += 1

    def pass_step(self) -> None:
        """Let the schedule go on, where others step and this rank has no rows."""
        self.steps.pass_step()
        self.step += 1

    def rates(self) -> list[float]:
        """The optimizer's rate, unless a schedule decides it."""
        return self.steps.rates()

    def set_rates(self, rates: Sequence[float]) -> None:
        self.steps.set_rates(rates)

    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self.optimizer.learning_rate)

    def eval_step(self, batch: Batch) -> None:
        """Judge a batch."""
        if batch.rows:
            inputs, labels = _arrays(batch.features), _arrays(batch.labels)
            outputs = self.model(*inputs)
            self._count(batch, self._mean_loss(outputs, labels, batch.rows), labels, outputs, trains=False)

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        """The outputs for these rows."""
        return [output.asnumpy() for output in _several(self.model(*_arrays(features)))]

    def merge_buffers(self) -> None:
        """Make BatchNorm's statistics those of all ranks' rows."""
        names = [name for name in self._parameters if name not in set(self.names())]
        if self._collective is None or self._collective.size == 1 or not names:
            return
        own = {name: self._value(self._parameters[name]) for name in names}
        weight = float(self._epoch_rows)
        means = dict(zip(names, self._collective.mean(list(own.values()), weight), strict=True))
        spread = [name for name in names if _mean_of(name) in own]
        about = [own[n] + np.square(own[_mean_of(n)] - means[_mean_of(n)]) for n in spread]
        if spread:
            means |= dict(zip(spread, self._collective.mean(about, weight), strict=True))
        [rows] = self._collective.sum([np.array([weight])])
        if rows[0]:
            for name, value in means.items():
                _assign(self._parameters[name], value)

    def take_tallies(self) -> bytes:
        """Sums of the loss and the metrics."""
        tallies = self._tallied.packed()
        self._tallied.clear()
        return tallies

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        """Sums of sums, divided once."""
        kept = self._tallied.packed()
        self._tallied.load(tallies)
        figures = {**self._tallied.figures(), "num_samples": self._tallied.rows}
        self._tallied.load([kept])
        return figures

    def running_loss(self) -> float:
        """The mean so far."""
        return self._tallied.figures()["loss"]

    def running_metrics(self) -> dict[str, float]:
        """The metrics so far."""
        return {name: value for name, value in self._tallied.figures().items() if name != "loss"}

    def loss_sums(self) -> tuple[float, float]:
        """The loss so far."""
        total, rows = self._tallied.sums.get("loss", [0.0, 0.0])
        return total, rows

    def variables(self) -> dict[str, Array]:
        """All parameters, and what the optimizer remembers."""
        values = {_PARAMETER + n: self._value(p) for n, p in self._parameters.items()}
        return values | self.steps.variables()

    def load_variables(self, variables: Mapping[str, Array]) -> None:
        """Take the parameters, and what the optimizer remembers.

        Raises:
            ConfigError: They are those of another block or optimizer.
        """
        self._load_parameters(variables)
        self.steps.load_variables(variables)

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """Go on from `state`; or take the parameters alone."""
        if not weights_only_model:
            super().load_state(data)
            return
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            self._load_parameters({name: file[name] for name in file.files if name.startswith(_PARAMETER)})

    def _load_parameters(self, variables: Mapping[str, Array]) -> None:
        missing = [name for name in self._parameters if _PARAMETER + name not in variables]
        if missing:
            raise ConfigError(f"this state has no parameter {missing[0]!r}; it is of another block.")
        for name, parameter in self._parameters.items():
            _assign(parameter, variables[_PARAMETER + name])

    def local_state(self) -> bytes:
        """Randomness, tallies, and this rank's own buffers."""
        trained = set(self.names())
        buffers = {n: self._value(p).tolist() for n, p in self._parameters.items() if n not in trained}
        tallies = self._tallied.packed().decode()
        own = {"own": own_states(), "tallies": tallies, "rows": self._epoch_rows, "buffers": buffers}
        return json.dumps(own).encode()

    def load_local_state(self, data: bytes) -> None:
        """Go on as this rank."""
        fields = json.loads(data)
        restore_own(fields["own"])
        self._epoch_rows = fields["rows"]
        self._tallied.load([fields["tallies"].encode()])
        for name, value in fields["buffers"].items():
            _assign(self._parameters[name], np.array(value))
        self._draw(self.epoch, self.step)

    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None:
        """The first rank counts for all that were there; buffers are those of the state."""
        if self.rank == 0:
            self._tallied.load([json.loads(data)["tallies"].encode() for data in states])
        seed_own(self.seed, self.epoch, self.rank, self.step)
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
        if isinstance(outputs, list | tuple):
            loss = self.loss(*outputs, *labels)
        else:
            loss = self.loss(outputs, *labels)
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


def _mean_of(name: str) -> str:
    return name.removesuffix("running_var") + "running_mean" if name.endswith("running_var") else ""
