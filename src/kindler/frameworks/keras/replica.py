"""Keras: one replica of the user's model, trained by Keras's own `fit` as one process would be.

Making the model is in `spec.py`, the exchange of gradients in `gradient_hook.py`, what `fit` tells on its way
in `callbacks.py`, the model as bytes in `state.py`. The training loop decides when a run begins and ends.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kindler.collective import Array, Collective, Gradients
from kindler.errors import ConfigError
from kindler.frameworks.base import BaseReplica, with_config
from kindler.frameworks.contract import Batch, Feed, Watch
from kindler.frameworks.keras import backends, callbacks, files
from kindler.frameworks.keras.dataset import Arranged, Remembering, dataset
from kindler.frameworks.keras.export import export
from kindler.frameworks.keras.gradient_hook import (
    Exchange,
    alone,
    install,
    install_remote,
    refuse_own_step,
    replaced,
)
from kindler.frameworks.keras.metrics import UNTRIED, Tallies
from kindler.frameworks.keras.scoring import scoring_model
from kindler.frameworks.keras.spec import (
    KerasSpec,
    against_several,
    build_model,
    check,
    custom_objects,
    dumps,
    lacking,
    loads,
    revived,
    synchronized,
    with_rate,
)
from kindler.frameworks.keras.state import (
    Variables,
    fork_seeds,
    pack,
    seed_of,
    unpack,
    value_of,
    variances,
)
from kindler.frameworks.keras.tried_loss import is_own, try_loss
from kindler.frameworks.rng import own_states, restore_own, seed_own
from kindler.frameworks.scoring_model import ScoringModel
from kindler.frameworks.state_format import Buffer


def preload() -> None:
    """Import what is slow to import: Keras and its backend; the process can be forked afterwards."""
    with backends.without_devices():
        import keras  # noqa: F401 - the environment says on which backend


class KerasReplica(BaseReplica):
    """One rank's copy of a Keras model; keeps the contracts `DriverModel` and `Fitter`.

    Args:
        spec: What the user handed in.
        device: "auto", "cpu" or "cuda".
        rank: This rank; dropout differs by it.
        local_rank: Its number on its host, which chooses the GPU.
        seed: Creators see every source of randomness seeded with it.
        threads: Threads of the backend's own operations; None leaves them as they are.
        feature_names: Names of the features, for models that take inputs by name.
        label_names: Names of the labels, for models that have outputs of those names.
        label_shapes: Not needed: Keras weighs by rows.
    """

    def __init__(
        self,
        spec: KerasSpec,
        *,
        device: str = "auto",
        rank: int = 0,
        local_rank: int = 0,
        seed: int = 0,
        threads: int | None = None,
        feature_names: Sequence[str] = (),
        label_names: Sequence[str] = (),
        label_shapes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.spec, self.rank, self.seed = spec, rank, seed
        if threads is not None:
            backends.settle(spec.backend, device=device, local_rank=local_rank, threads=threads)
        if spec.model_creator is not None:
            backends.seed_everything(spec.backend, seed)
        self.model = build_model(spec)
        seed_own(seed, 0, rank)
        self.flavour = backends.flavour_of(self.model) or "keras"
        self.keras: Any = importlib.import_module(self.flavour)
        self.device = device
        self.epoch = self.step = 0
        self.output_names: tuple[str, ...] | None = None
        self.arrange(feature_names, label_names)
        self.epoch_rows = 0
        self.may_idle = False
        self._collective: Collective | None = None
        self._exchange: Exchange | None = None
        self._meets = self._tried = False
        self._signature: list[tuple[str, tuple[int, ...]]] = []
        self._tallies: Tallies | None = None
        self._drawn: list[Array] = []
        self._before: dict[int, bytes] = {}
        self._drawing_ops: Any = None
        self._kept: tuple[list[Array], list[Array]] = ([], [])

    def arrange(self, features: Sequence[str], labels: Sequence[str], *, by_name: bool = False) -> None:
        """Say what batches consist of; `by_name` calls the model with names unless it was told otherwise."""
        inputs = "dict" if by_name and self.spec.inputs == "auto" else self.spec.inputs
        self._features = list(features)
        self._arranged = Arranged(self.model, inputs=inputs, features=features, labels=labels)

    @property
    def on_gpu(self) -> bool:
        """Whether the backend computes on a GPU."""
        return backends.on_gpu(self.spec.backend)

    @property
    def runs_ahead(self) -> bool:
        """On a GPU, and with JAX, which only waits for other ranks."""
        alone = self._collective is None or self._collective.size == 1
        return self.on_gpu or (self.spec.backend == "jax" and alone)

    @classmethod
    def scoring_model(
        cls,
        spec: KerasSpec,
        live: KerasReplica | None,
        state: Callable[[], bytes],
        before: ScoringModel | None,
    ) -> ScoringModel:
        """The model without its optimizer."""
        return scoring_model(spec, state, before)

    @classmethod
    def may_use_gpus(cls, spec: KerasSpec) -> bool:
        """Whether the backend could compute on a GPU."""
        return backends.may_use_gpus(spec.backend)

    @classmethod
    def from_bytes(cls, spec: bytes, **options: Any) -> KerasReplica:
        """A replica of the spec that `dumps` packed; the options are the constructor's."""
        return cls(loads(spec), **options)

    @classmethod
    def make_spec(cls, *, keras_backend: str | None = None, **options: Any) -> KerasSpec:
        """A spec of these fields of `KerasSpec`; `config` may be None."""
        spec = KerasSpec(**{**options, "config": dict(options.get("config") or {})})
        if complaints := check(spec):
            raise ConfigError("\n".join(complaints))
        chosen = backends.backend_of(spec.model, keras_backend)
        backends.require(chosen)
        return replace(spec, backend=chosen)

    @classmethod
    def changed(cls, spec: KerasSpec, *, config: Mapping[str, Any], learning_rate: float | None) -> KerasSpec:
        """The spec with these entries of its config; the rate is set in the compiled model."""
        spec = with_config(spec, config)
        return spec if learning_rate is None else with_rate(spec, learning_rate)

    dumps = staticmethod(dumps)
    loads = staticmethod(revived)
    lacking = staticmethod(lacking)
    against_several = staticmethod(against_several)
    divisible = True

    @classmethod
    def against_server(cls, spec: KerasSpec) -> list[str]:
        """A train step of the user's own applies its gradients itself."""
        flavour = backends.flavour_of(spec.model) if spec.model is not None else None
        try:
            if flavour:
                refuse_own_step(spec.model, importlib.import_module(flavour))
        except ConfigError as exc:
            return [str(exc)]
        return []

    @classmethod
    def against_parts(cls, spec: KerasSpec) -> list[str]:
        """The norm of all gradients is known to none of several servers."""
        optimizer = getattr(spec.model, "optimizer", None)
        if getattr(optimizer, "global_clipnorm", None):
            return ["global_clipnorm needs the gradients of all parameters."]
        return []

    @staticmethod
    def environment(spec: KerasSpec) -> tuple[tuple[str, str], ...]:
        """Keras reads its backend from there."""
        return backends.environment(spec.backend)

    @staticmethod
    def has_instance(spec: KerasSpec) -> bool:
        """Whether the user handed in a model rather than a way to make one."""
        return spec.model is not None

    @property
    def optimizer(self) -> Any:
        """What the model was compiled with."""
        return self.model.optimizer

    @property
    def _variables(self) -> Variables:
        """All that training changes."""
        return Variables(self.model)

    @property
    def tallies(self) -> Tallies:
        """The metrics, as sums that can be merged."""
        if self._tallies is None:
            self._tallies = Tallies(self.model)
        return self._tallies

    def build(self, features: Sequence[Array], labels: Sequence[Array], *, may_idle: bool = False) -> None:
        """Make every variable of the model, its metrics and its optimizer, from the shapes of a batch."""
        self.may_idle = may_idle
        sample = [_zeros((1, *array.shape[1:]), array.dtype) for array in features]
        self._signature = [(str(array.dtype), tuple(array.shape[1:])) for array in features]
        if not self._compiled:
            raise ConfigError(
                "the model is not compiled.\nHint: its creator must call"
                " model.compile(optimizer=..., loss=...), or pass compile_args_creator=... to"
                " Estimator.from_keras."
            )
        targets = [np.zeros((1, *array.shape[1:]), array.dtype) for array in labels]
        batch = _with_text(self._arranged.batch(sample, targets))
        if self.flavour == "tf_keras":
            importlib.import_module("kindler.frameworks.keras.on_tensorflow").judge_once(self.model, batch)
        else:
            self.model._symbolic_build(data_batch=batch)
        self._build_optimizers()
        self._tallies = Tallies(self.model)
        if not labels:
            for name in ("train_step", "test_step"):
                replaced(self.model, name, alone)
        if self.spec.backend == "tensorflow":
            self._drawing_ops = self._on_backend.DrawingOps(self.model)

    def try_metrics(self, batch: Batch) -> list[str]:
        """Try metrics of the user's own on these rows: those of several ranks are merged."""

        def judge(parts: Sequence[slice]) -> None:
            self.evaluate(_Parts(batch, parts))

        if type(self.model).train_step is self.keras.Model.train_step:
            return self.tallies.try_out(judge, batch.rows)
        try:
            return self.tallies.try_out(judge, batch.rows, own_step=True)
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - a model with a train step of its own may not be able to judge rows
            return [UNTRIED]

    def join(self, collective: Collective) -> None:
        """Start from rank 0's variables."""
        self._collective = collective
        if collective.size == 1:
            return
        if complaints := synchronized(self.model):
            raise ConfigError(complaints[0])
        variables = self._variables
        variables.assign(collective.broadcast(variables.read()))

    def share_steps(self, collective: Collective) -> None:
        """Let every optimizer of the model apply the mean over the rows of all ranks, in `fit` too."""
        if collective.size == 1:
            return
        if getattr(self.model, "jit_compile", False) and self.spec.backend == "tensorflow":
            self.model.jit_compile = False  # XLA cannot leave the graph for the exchange
        self._meets = collective is self._collective
        self._exchange = install(
            self.model, collective, self.spec.backend, may_idle=self.may_idle, gathers=self._meets
        )

    def send_steps(self, learn: Callable[[Sequence[Array], float], list[Array]]) -> None:
        """Let `learn` move the parameters in the place of the optimizer, in `fit` too."""
        refuse_own_step(self.model, self.keras)
        if getattr(self.model, "jit_compile", False) and self.spec.backend == "tensorflow":
            self.model.jit_compile = False  # XLA cannot leave the graph
        self._exchange = install_remote(self.model, learn, self.spec.backend, may_idle=self.may_idle)

    def own_callbacks(self, callbacks_given: Sequence[Any]) -> list[Any]:
        """All of them on the first rank, and on the others those that do more than write."""
        return [c for c in callbacks_given if self.rank == 0 or not callbacks.writes(self.keras, c)]

    def remembering(self, callback: Any) -> callbacks.Remembering:
        """What the callback counts."""
        return callbacks.Remembering(callback)

    def hooks(
        self, callbacks_here: Sequence[Any], watch: Watch, *, size: int, epochs: int, steps: int
    ) -> Any:
        """The list of callbacks for `fit`."""
        return callbacks.make_hooks(
            self.keras,
            callbacks_here,
            model=self.model,
            watch=watch,
            several=size > 1,
            epochs=epochs,
            steps=steps,
            verbose=0,
            rank=self.rank,
            size=size,
        )

    @property
    def stopping(self) -> bool:
        """Whether `fit` was asked to end."""
        return bool(self.model.stop_training)

    def look_at(self, batch: Batch) -> None:
        """Check that the losses can mean the labels of a batch.

        Raises:
            DataError: One of them cannot.
        """

        def within(row: int) -> str:
            return f"{row} of the {batch.rows} that worker {self.rank} has in a step"

        self._arranged.check(batch.labels, batch.where or within)

    def train_step(self, batch: Batch) -> None:
        """One step of Keras's own."""
        self.look_at(batch)
        if batch.global_rows:
            with _kept_metrics(self.model):
                self.model.train_on_batch(*self._arranged.batch(batch.features, batch.labels))
            self._count(batch)
            self.step += 1

    def eval_step(self, batch: Batch) -> None:
        """One batch of Keras's own evaluation."""
        self.look_at(batch)
        if batch.rows:
            with _kept_metrics(self.model):
                self.model.test_on_batch(*self._arranged.batch(batch.features, batch.labels))
            self.tallies.rows += batch.rows

    def names(self) -> list[str]:
        """The paths of the trained variables."""
        return [str(getattr(v, "path", None) or v.name) for v in self.model.trainable_variables]

    def read(self) -> list[Array]:
        """Copies of the trained variables."""
        self._settle()
        return [self._variables.value(v) for v in self.model.trainable_variables]

    def write(self, arrays: Sequence[Array]) -> None:
        """Overwrite the trained variables."""
        self._settle()
        for variable, array in zip(self.model.trainable_variables, arrays, strict=True):
            variable.assign(array)

    def gradients(self, batch: Batch) -> Gradients:
        """The gradient of the loss that the model was compiled with.

        Raises:
            ConfigError: The model has a train step of its own, of which only Keras knows what it does.
        """
        refuse_own_step(self.model, self.keras)
        self._settle()
        self.look_at(batch)
        like = self.read()
        if not batch.rows:
            return Gradients([np.zeros_like(array) for array in like], 0.0)
        inputs, targets, weights = (*self._arranged.batch(batch.features, batch.labels), None, None)[:3]
        arrays = self._on_backend.gradients(self.model, inputs, targets, weights)
        self._count(batch)
        found = [np.zeros_like(b) if a is None else np.asarray(a) for a, b in zip(arrays, like, strict=True)]
        return Gradients(found, float(batch.rows))

    def apply(self, gradients: Sequence[Array | None]) -> None:
        """One step of the optimizer that the model was compiled with."""
        self._settle()
        self._on_backend.apply(self.model, gradients)
        self.step += 1

    def join_parts(self, states: Sequence[bytes], owned: Sequence[Sequence[int]]) -> bytes:
        """The first server's state, with what the others have changed.

        This replica's own optimizer never moved: a server that has another value has changed it.
        """
        fields, mine = unpack(self.state())
        trained = {id(v): place for place, v in enumerate(self.model.trainable_variables)}
        home = {place: server for server, places in enumerate(owned) for place in places}
        parts = [unpack(data)[1] for data in states]
        whole = []
        for number, variable in enumerate(self._variables.all()):
            if id(variable) in trained:
                whole.append(parts[home[trained[id(variable)]]][number])
            else:
                before = mine[number].tobytes()
                changed = [part[number] for part in parts if part[number].tobytes() != before]
                whole.append(changed[0] if changed else mine[number])
        fields["step"] = unpack(states[0])[0]["step"]
        return pack(fields, whole)

    def rates(self) -> list[float]:
        """The optimizer's rate, unless a schedule decides it."""
        optimizer = self.model.optimizer
        own = vars(optimizer).get("_learning_rate", optimizer.learning_rate)
        scheduled = callable(own) and not hasattr(own, "assign")
        return [] if scheduled else [float(np.asarray(optimizer.learning_rate))]

    def set_rates(self, rates: Sequence[float]) -> None:
        if rates:
            self.model.optimizer.learning_rate = rates[0]

    def _count(self, batch: Batch) -> None:
        self.epoch_rows += batch.rows
        self.tallies.rows += batch.rows

    def fit(
        self,
        feed: Feed,
        hooks: Any,
        *,
        epochs: tuple[int, int],
        class_weight: Mapping[int, float] | None = None,
        ends: bool = True,
    ) -> None:
        """Keras's own `fit` over the epochs of `feed`.

        Args:
            feed: The batches of an epoch.
            hooks: Told of every step and epoch.
            epochs: The first, counted from 0, and the one after the last.
            class_weight: Weights of labels.
            ends: False where training goes on after this, so that nothing is made final.
        """
        self._try_loss(feed)
        exchange = nullcontext() if self._exchange is None else self._exchange.unwrapped()
        told = Remembering(feed)
        ending = nullcontext() if ends else _unfinished(self.model.optimizer)
        with exchange, told.unwrapped(), ending, backends.fitting(self.spec.backend):
            self.model.fit(
                dataset(self.keras, self.spec.backend, told, self._arranged),
                initial_epoch=epochs[0],
                epochs=epochs[1],
                callbacks=hooks,
                class_weight=class_weight,
                verbose=0,
                shuffle=False,
            )

    def _try_loss(self, feed: Feed) -> None:
        """Whether a loss of the user's own can be put together from those of several workers' rows."""
        if self._tried or self._collective is None or self._collective.size == 1:
            return
        self._tried = True
        if not is_own(self.model, self.keras):
            return
        features, labels = feed.batch(0)
        if len(features[0]):
            self.keep_step()
            batch = self._arranged.batch(features, labels)
            backend = self.spec.backend
            try_loss(self.model, self.keras, backend, batch, undo=self.undo_step, gathers=self._meets)

    def evaluate(self, feed: Feed, hooks: Any = None) -> None:
        """Judge the rows of `feed`; the figures stay in the metrics, for `tallies`."""
        if not len(feed):
            self.model.reset_metrics()
            return
        told = Remembering(feed)
        with told.unwrapped():
            self.model.evaluate(
                dataset(self.keras, self.spec.backend, told, self._arranged),
                verbose=0,
                callbacks=hooks,
                return_dict=True,
            )

    def begin_epoch(self, epoch: int) -> None:
        """Dropout of several ranks differs, and depends on the epoch: a resumed epoch is the same."""
        self.epoch, self.epoch_rows = epoch, 0
        if self._collective is not None and self._collective.size > 1:
            fork_seeds(self.model, self.seed, epoch, self.rank)
            buffers = [variable for part in self._variables.buffers() for variable in part]
            self._before = {id(variable): self._variables.value(variable).tobytes() for variable in buffers}
        # The user's own code draws other numbers on every rank and in every epoch.
        backends.seed_everything(self.spec.backend, seed_of(self.seed, epoch, self.rank), compiled=False)
        if self._drawing_ops is not None:
            self._drawing_ops.begin_epoch()

    def begin_step(self) -> None:
        """Draw on from where the epoch was left: not earlier, for Keras draws itself to open its dataset."""
        if self._drawn:
            self._on_torch.restore_randomness(self._drawn)
            self._drawn = []

    def keep_step(self) -> None:
        """Copy everything that a step changes; what the step before has made is known already."""
        self._settle()
        counted = [value_of(variable) for variable in self.tallies.variables]
        self._kept = (self._variables.read(), counted)

    def step_is_finite(self) -> bool:
        """Whether the trained variables are."""
        return all(bool(np.isfinite(array).all()) for array in self.read() if array.dtype.kind == "f")

    def undo_step(self) -> None:
        """Weights, optimizer, buffers, seeds and metrics as they were."""
        self._settle()
        arrays, counted = self._kept
        self._variables.assign(arrays)
        for variable, value in zip(self.tallies.variables, counted, strict=True):
            variable.assign(value)

    def merge_buffers(self) -> None:
        """Make what training changed besides weights (BatchNorm's statistics) the same on all ranks.

        What no rank has changed (frozen weights, tables) is left alone: its mean would be rounded. Floating
        point becomes the mean by rows. The variances of a layer that keeps means and variances become those
        of all rows: with w the share of rows, m = sum(w_r m_r) and v = sum(w_r (v_r + (m_r - m)^2)).
        """
        if self._collective is None or self._collective.size == 1:
            return
        value = self._variables.value
        floats, others = (self._changed(part) for part in self._variables.buffers())
        means_of = variances(self.model)
        own_means = {id(v): value(means_of[id(v)]) for v in floats if id(v) in means_of}
        self._assign_means([(v, value(v)) for v in floats if id(v) not in means_of])
        # The means are those of all ranks now.
        spread = [
            (v, value(v) + np.square(own_means[id(v)] - value(means_of[id(v)])))
            for v in floats
            if id(v) in means_of
        ]
        self._assign_means(spread)
        # Counters and the like cannot be averaged: rank 0's are everybody's.
        taken = self._collective.broadcast([value(v) for v in others]) if others else []
        for variable, everybodys in zip(others, taken, strict=True):
            variable.assign(everybodys)

    def _assign_means(self, pairs: Sequence[tuple[Any, Array]]) -> None:
        """Assign to variables the means of these values over the rows of all ranks."""
        if self._collective is not None and pairs:
            merged = self._collective.mean([value for _, value in pairs], float(self.epoch_rows))
            for (variable, _), mean in zip(pairs, merged, strict=True):
                variable.assign(mean)

    def _changed(self, buffers: Sequence[Any]) -> list[Any]:
        """Those that some rank has changed since the epoch began; all ranks call it together."""
        if not buffers or self._collective is None:
            return []
        # Bytes, so that NaN is equal to itself.
        mine = [self._before.get(id(v)) != self._variables.value(v).tobytes() for v in buffers]
        flags = self._collective.sum([np.array(mine, np.float32)])[0]
        return [variable for variable, flag in zip(buffers, flags, strict=True) if flag]

    def take_tallies(self) -> bytes:
        """The metrics' variables, which begin anew."""
        part = self.tallies.take()
        self.tallies.reset()
        return part

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        """The metrics over all ranks."""
        figures = self.tallies.load(self.tallies.joined(tallies))
        figures["num_samples"] = self.tallies.rows
        self.tallies.reset()
        return figures

    def metric_states(self) -> bytes:
        """The metrics' variables, which count on."""
        return self.tallies.take()

    def join_metric_states(self, states: Sequence[bytes]) -> bytes:
        """Their sums."""
        return self.tallies.joined(states)

    def load_metric_states(self, joined: bytes) -> dict[str, Any]:
        """The metrics over all ranks, whose variables hold the merged state afterwards."""
        return self.tallies.load(joined)

    def figures(self) -> dict[str, Any]:
        """The metrics' present results."""
        return self.tallies.figures()

    def running_loss(self) -> float:
        """The mean so far."""
        return float(self.figures().get("loss", float("nan"))) if self.tallies.rows else float("nan")

    def running_metrics(self) -> dict[str, float]:
        """The metrics so far."""
        figures = self.figures().items()
        return {name: v for name, v in figures if name != "loss" and isinstance(v, int | float)}

    def loss_sums(self) -> tuple[float, float]:
        """The loss so far."""
        rows = self.tallies.rows
        return (self.running_loss() * rows if rows else 0.0), float(rows)

    def learning_rate(self) -> float:
        """The rate of the next step."""
        rate = self.model.optimizer.learning_rate
        if callable(rate):  # Keras 2 leaves a schedule to be called
            rate = rate(self.model.optimizer.iterations)
        return float(np.asarray(rate))

    def freeze(self) -> Callable[[], Sequence[Buffer]]:
        """A copy of all that the next step depends on; the function makes bytes of it later."""
        self._settle()
        if self._compiled and self.model.built:
            self._build_optimizers()  # the user may have compiled the model anew
        variables = self._variables
        arrays = variables.read()
        fields = {
            "epoch": self.epoch,
            "step": self.step,
            "names": variables.names(),
            "own": len(variables.own()),
            "signature": self._signature,
            "features": self._features,
        }
        return lambda: [pack(fields, arrays)]

    def state(self) -> bytes:
        """Weights, optimizer, randomness, epoch and step."""
        return b"".join(self.freeze()())

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """Go on from `state`, or take only the model's own variables from it."""
        fields, arrays = unpack(data)
        self._build_from(fields["signature"], fields["features"])
        variables = self._variables
        if weights_only_model or not self._compiled:
            count = len(variables.own())
            variables.assign(arrays[:count], fields["names"][:count], only_own=True)
            return
        variables.assign(arrays, fields["names"])
        self.epoch, self.step = fields["epoch"], fields["step"]

    def local_state(self) -> bytes:
        """What only this rank has in the middle of an epoch: buffers, randomness, metrics so far."""
        self._settle()
        buffers = [variable for part in self._variables.buffers(seeds=True) for variable in part]
        arrays = [self._variables.value(variable) for variable in [*buffers, *self.tallies.variables]]
        drawn = self._on_torch.randomness() if self.spec.backend == "torch" else []
        return pack({"own": own_states()}, [*arrays, *drawn])

    def load_local_state(self, data: bytes) -> None:
        """Go on in the middle of an epoch; `load_state` came before."""
        fields, arrays = unpack(data)
        if "own" in fields:
            restore_own(fields["own"])
        buffers = [variable for part in self._variables.buffers(seeds=True) for variable in part]
        variables = [*buffers, *self.tallies.variables]
        for variable, array in zip(variables, arrays[: len(variables)], strict=True):
            variable.assign(array)
        self._drawn = arrays[len(variables) :]

    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None:
        """The same from the states of other ranks than there are now, which had even shares of the rows."""
        variables = self._variables
        floats, others = variables.buffers()
        known = {
            id(v): place for place, v in enumerate(p for part in variables.buffers(seeds=True) for p in part)
        }
        told = [unpack(data)[1] for data in states]
        means_of = variances(self.model)
        for variable in floats:
            values = np.stack([arrays[known[id(variable)]] for arrays in told])
            merged = values.mean(axis=0, dtype=np.float64)
            if id(variable) in means_of:
                place = known[id(means_of[id(variable)])]
                merged += np.stack([arrays[place] for arrays in told]).var(axis=0, dtype=np.float64)
            variable.assign(merged.astype(values.dtype))
        for variable in others:
            variable.assign(told[0][known[id(variable)]])
        if self.rank == 0:
            self.tallies.load_sum([arrays[len(known) :] for arrays in told])
        seed_own(self.seed, self.epoch, self.rank, self.step)
        if size > 1:
            fork_seeds(self.model, self.seed, self.epoch, self.rank, self.step)
        if self.spec.backend == "torch":
            self._on_torch.reseed(seed_of(self.seed, self.epoch, self.rank, self.step))
            self._drawn = self._on_torch.randomness()

    def save(self, path: str) -> None:
        """Write the model as Keras does: `.keras`, `.h5`, `.weights.h5`, or a folder for serving."""
        self._settle()
        files.save(self.model, path, flavour=self.flavour)

    def load(self, path: str) -> None:
        """Take weights (and the optimizer's state, where the file has it) from what `save` wrote."""
        if self._compiled and self.model.built:
            self._build_optimizers()  # so that the state has all that workers will look for
        files.load_into(self.model, path, self.keras, self._custom_objects())

    def predict(self, features: Sequence[Array]) -> list[Array]:
        """The outputs for these rows; several outputs in the model's order."""
        outputs = self.model.predict_on_batch(_with_text(self._arranged.inputs(features)))
        named = list(_leaves(outputs))
        self.output_names = tuple(name for name, _ in named) if isinstance(outputs, Mapping) else None
        return [np.asarray(part) for _, part in named]

    def export(self, form: str, path: str, features: Sequence[Array]) -> None:
        """Write the model as "onnx" or "openvino"; a few rows of its inputs were predicted before."""
        self._settle()
        backend = "tf_keras" if self.flavour == "tf_keras" else self.spec.backend
        export(self.model, form, path, backend=backend, features=features)

    def trained_model(self) -> Any:
        """The model itself."""
        self._settle()
        return self.model

    def weights(self) -> bytes:
        """A file of weights as Keras writes it."""
        with tempfile.TemporaryDirectory(prefix="kindler-weights-") as folder:
            path = os.path.join(folder, "model.weights.h5")
            self.save(path)
            return Path(path).read_bytes()

    def load_weights(self, data: bytes) -> None:
        """Take the weights of such a file."""
        with tempfile.TemporaryDirectory(prefix="kindler-weights-") as folder:
            path = os.path.join(folder, "model.weights.h5")
            Path(path).write_bytes(data)
            self.load(path)

    @property
    def _compiled(self) -> bool:
        return backends.is_compiled(self.model)

    @property
    def _on_backend(self) -> Any:
        return importlib.import_module(f"kindler.frameworks.keras.on_{self.spec.backend}")

    @property
    def _on_torch(self) -> Any:
        return importlib.import_module("kindler.frameworks.keras.on_torch")

    def _settle(self) -> None:
        """JAX trains on a copy of the variables; bring them up to date."""
        if self.spec.backend == "jax" and getattr(self.model, "_jax_state", None):
            self.model.jax_state_sync()

    def _build_from(self, signature: Sequence[Sequence[Any]], features: Sequence[str]) -> None:
        self._features = list(features)
        if signature and not (self.model.built and self.model.variables):
            arrays = [_zeros((1, *shape), dtype) for dtype, shape in signature]
            arranged = Arranged(self.model, inputs=self.spec.inputs, features=features, labels=())
            self.model(_with_text(arranged.inputs(arrays)))
        self._signature = [(dtype, tuple(shape)) for dtype, shape in signature]
        if self._compiled:
            self._build_optimizers()

    def _build_optimizers(self) -> None:
        for optimizer in self._variables.optimizers:
            if not getattr(optimizer, "built", False):
                optimizer.build(self.model.trainable_variables)

    def _custom_objects(self) -> dict[str, Any]:
        return custom_objects(self.model, self.flavour)


class _Parts:
    """Some rows of a batch, as batches of their own."""

    varies = True

    def __init__(self, batch: Batch, parts: Sequence[slice]) -> None:
        self._batch, self._parts = batch, parts

    def __len__(self) -> int:
        return len(self._parts)

    def batch(self, number: int) -> tuple[Any, Any]:
        part, whole = self._parts[number], self._batch
        return [array[part] for array in whole.features], [array[part] for array in whole.labels]


@contextmanager
def _unfinished(optimizer: Any) -> Iterator[None]:
    """Keep `fit` from replacing weights by their moving averages, which it does at its end."""
    if not hasattr(optimizer, "finalize_variable_values"):
        yield
        return
    object.__setattr__(optimizer, "finalize_variable_values", lambda variables: None)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "finalize_variable_values")


@contextmanager
def _kept_metrics(model: Any) -> Iterator[None]:
    """Keep Keras from forgetting metrics with every batch, which it does where batches come one by one."""
    object.__setattr__(model, "reset_metrics", lambda: None)
    try:
        yield
    finally:
        object.__delattr__(model, "reset_metrics")


def _leaves(outputs: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each output with its name; those of nested outputs are joined."""
    if isinstance(outputs, Mapping):
        parts = list(outputs.items())
    elif isinstance(outputs, list | tuple):
        parts = list(enumerate(outputs))
    else:
        yield name, outputs
        return
    for key, part in parts:
        yield from _leaves(part, f"{name}_{key}" if name else str(key))


def _with_text(batch: Any) -> Any:
    """The same with text as TensorFlow's tensors, which alone say that it is text."""
    if isinstance(batch, dict):
        return {name: _with_text(part) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_with_text(part) for part in batch)
    if not isinstance(batch, np.ndarray) or batch.dtype != object:
        return batch
    return importlib.import_module("tensorflow").constant(batch)


def _zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros, or empty texts."""
    return np.full(shape, "", object) if np.dtype(dtype) == object else np.zeros(shape, dtype)
