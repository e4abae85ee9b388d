"""One replica of the user's Keras model, trained by Keras's own `fit`."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kindler.collective import Array, Batch, Collective, Gradients, gathering
from kindler.errors import ConfigError, SyncError
from kindler.frameworks.base import BaseReplica, with_config
from kindler.frameworks.contract import Facts, Use, Variables
from kindler.frameworks.keras import backends, callbacks, files, gradient_hook
from kindler.frameworks.keras import spec as specs
from kindler.frameworks.keras.dataset import Arranged, dataset, with_text, zeros
from kindler.frameworks.keras.export import export
from kindler.frameworks.keras.gradient_hook import (
    Current,
    HostCode,
    alone,
    instead,
    optimizers,
    refuse_own_step,
)
from kindler.frameworks.keras.metrics import UNTRIED, Tallies
from kindler.frameworks.keras.spec import KerasSpec
from kindler.frameworks.keras.state import (
    ModelVariables,
    fork_seeds,
    pack,
    path_of,
    seed_of,
    unpack,
    value_of,
    variances,
)
from kindler.frameworks.keras.tried_loss import is_own, try_loss
from kindler.frameworks.merged_buffers import merge_parts
from kindler.frameworks.rng import OwnGenerators, own_states, restore_own, seed_own
from kindler.frameworks.state_format import Buffer, ScoringModel
from kindler.temporary import Folder


def preload() -> None:
    """The process can still be forked afterwards."""
    with backends.without_devices():
        import keras  # noqa: F401 - the environment says on which backend


class KerasReplica(BaseReplica):
    """Steps like any replica; Keras's own `fit` (see `train/fit_loop.py`) is faster and calls callbacks."""

    divisible = True

    def __init__(
        self,
        spec: KerasSpec,
        *,
        device: str = "auto",
        local_rank: int = 0,
        threads: int | None = None,
        feature_names: Sequence[str] = (),
        label_names: Sequence[str] = (),
        compiled: Path | None = None,
        **options: Any,
    ) -> None:
        """`compiled` is a folder for compiled code, for a process that takes the place of this one."""
        super().__init__(spec, device=device, **options)
        self._on = backends.on(spec.backend)
        if threads is not None:
            self._on.configure(device=device, local_rank=local_rank, threads=threads)
        if compiled is not None and spec.backend == "jax":
            self._on.keep_compiled(compiled)
        if spec.model_creator is not None:
            backends.seed_everything(spec.backend, self.seed)
        self.model = specs.build_model(spec)
        self._variables = ModelVariables(self.model)
        seed_own(self.seed, 0, self.rank)
        self.flavour = backends.flavour_of(self.model) or "keras"
        self.keras: Any = importlib.import_module(self.flavour)
        self.arrange(feature_names, label_names)
        self.may_idle = False
        self._exchange: HostCode | None = None
        self._meets = self._tried = False
        self._signature: list[tuple[str, tuple[int, ...]]] = []
        self._drawn: list[Array] = []
        self._drawing_ops: Any = None
        self._kept: tuple[list[Array], list[Array]] = ([], [])
        self._current: Current | None = None
        self.after_exchange: Callable[[], None] = lambda: None
        self._generators = OwnGenerators()
        self._judged: Any = None  # what this step's metrics will be given after the exchange
        self._is_ahead = self._drew_globally = False

    def arrange(self, features: Sequence[str], labels: Sequence[str], *, by_name: bool = False) -> None:
        """Set the columns of batches; `by_name` passes inputs by name unless the spec says otherwise."""
        inputs = "dict" if by_name and self.spec.inputs == "auto" else self.spec.inputs
        self._features = list(features)
        self._arranged = Arranged(self.model, inputs=inputs, features=features, labels=labels)

    @property
    def on_gpu(self) -> bool:
        return bool(self._on.on_gpu())

    @property
    def runs_ahead(self) -> bool:
        """Steps return before they are done: on a GPU, and on JAX unless it waits for other ranks."""
        return self.on_gpu or (self.spec.backend == "jax" and self._others is None)

    @classmethod
    def scoring_model(
        cls, spec: KerasSpec, live: Any, state: Callable[[], bytes], before: ScoringModel | None
    ) -> ScoringModel:
        return specs.scoring_model(spec, state, before)

    @classmethod
    def from_bytes(cls, spec: bytes, **options: Any) -> KerasReplica:
        return cls(specs.loads(spec), **options)

    @classmethod
    def make_spec(cls, **options: Any) -> KerasSpec:
        return specs.make_spec(**options)

    @classmethod
    def changed(cls, spec: KerasSpec, *, config: Mapping[str, Any], learning_rate: float | None) -> KerasSpec:
        spec = with_config(spec, config)
        return spec if learning_rate is None else specs.with_rate(spec, learning_rate)

    dumps = staticmethod(specs.dumps)
    loads = staticmethod(specs.revived)

    @classmethod
    def facts(cls, spec: KerasSpec) -> Facts:
        return Facts(
            gpus=backends.may_use_gpus(spec.backend),
            has_instance=spec.model is not None,
            environment=backends.environment(spec.backend),
        )

    @classmethod
    def complaints(cls, spec: KerasSpec, use: Use, value: Any = None) -> list[str]:
        model = spec.model
        if use in ("train", "judge") and specs.is_uncompiled(spec):
            hint = "call model.compile(optimizer=..., loss=...), or pass compile_args=... to from_keras"
            return [f"the model is not compiled; {hint}."]
        if use == "several" and model is not None and not isinstance(model, specs.Archive):
            return specs.synchronized(model)
        if use == "server" and (flavour := backends.flavour_of(model)):
            try:  # a train step of the user's own applies its gradients itself
                refuse_own_step(model, importlib.import_module(flavour))
            except ConfigError as exc:
                return [str(exc)]
        if use == "parts" and getattr(getattr(model, "optimizer", None), "global_clipnorm", None):
            # The norm of all gradients is known to none of several servers.
            return ["global_clipnorm needs the gradients of all parameters."]
        return super().complaints(spec, use, value)

    @property
    def optimizer(self) -> Any:
        return self.model.optimizer

    @cached_property
    def tallies(self) -> Tallies:
        return Tallies(self.model)

    def build(self, features: Sequence[Array], labels: Sequence[Array], *, may_idle: bool = False) -> None:
        self.may_idle = may_idle
        sample = [zeros((1, *array.shape[1:]), array.dtype) for array in features]
        self._signature = [(str(array.dtype), tuple(array.shape[1:])) for array in features]
        if not self._compiled:
            raise ConfigError(
                "the model is not compiled.\nHint: its creator must call"
                " model.compile(optimizer=..., loss=...), or pass compile_args=... to"
                " Estimator.from_keras."
            )
        targets = [np.zeros((1, *array.shape[1:]), array.dtype) for array in labels]
        batch = with_text(self._arranged.batch(sample, targets))
        if self.flavour == "tf_keras":
            self._on.judge_once(self.model, batch)
        else:
            self.model._symbolic_build(data_batch=batch)
        self._build_optimizers()
        self.tallies = Tallies(self.model)
        if not labels:
            for name in ("train_step", "test_step"):
                object.__setattr__(self.model, name, alone(getattr(self.model, name)))
        if self.spec.backend == "tensorflow":
            self._drawing_ops = self._on.DrawingOps(self.model)

    def try_metrics(self, batch: Batch) -> list[str]:
        def judge(parts: Sequence[slice]) -> None:
            self.evaluate(_Parts(batch, parts))

        own_step = type(self.model).train_step is not self.keras.Model.train_step
        try:
            return self.tallies.try_out(judge, batch.rows, own_step=own_step)
        except ConfigError:
            raise
        except Exception:  # a model with a train step of its own may not be able to judge rows
            if not own_step:
                raise
            return [UNTRIED]

    def join(self, collective: Collective) -> None:
        self._collective = collective
        if collective.size == 1:
            return
        if complaints := specs.synchronized(self.model):
            raise ConfigError(complaints[0])
        self._variables.assign(collective.broadcast(self._variables.read()))

    def share_steps(self, collective: Collective) -> None:
        """Make every optimizer apply the mean over the rows of all ranks, within `fit`, too."""
        if collective.size == 1:
            return
        self._leave_graphs()
        self._meets = collective is self._collective
        self._current, self._exchange = Current(collective), HostCode(self._mean_of_all)
        gradient_hook.share_steps(
            self.model,
            self._current,
            self._exchange,
            self.spec.backend,
            may_idle=self.may_idle,
            gathers=self._meets,
        )
        if self.regroups:
            # On other backends nothing changes before the exchange but what `raw` returns.
            if self.spec.backend == "jax":
                self._on.keep_steps(self.model)
            if self._on.READS_AHEAD:
                object.__setattr__(self.model, "compute_loss", self._noting(self.model.compute_loss))

    def _mean_of_all(self, arrays: Sequence[Array], weight: float) -> list[Array]:
        assert self._current is not None, "share_steps comes first"
        if self._on.READS_AHEAD:
            self._is_ahead = True
            self.before_exchange()
            self._is_ahead = False
            self._judged = None  # it may be large
        means = self._current.collective.mean(arrays, weight)
        self.after_exchange()
        return means

    def _noting(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        def noted(
            x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **options: Any
        ) -> Any:
            self._judged = y, y_pred, sample_weight
            return compute_loss(x, y, y_pred, sample_weight, **options)

        return noted

    @property
    def regroups(self) -> bool:
        """Only where Keras's own step is made: its metrics are counted after the exchange."""
        model, keras = self.model, self.keras.Model
        return (
            self.flavour == "keras"
            and not (self.on_gpu or self.may_idle)
            and self._on.goes_back(model)
            and model.steps_per_execution == 1
            and type(model).train_step is keras.train_step
            and type(model).compute_metrics is keras.compute_metrics
        )

    def rejoin(self, collective: Collective, state: bytes = b"") -> None:
        super().rejoin(collective, state)
        self._tried = True  # by those that were there before
        if self._current is not None:
            self._current.collective = collective
        if state and self._drawing_ops is not None:
            self._drawing_ops.found = False  # or nobody had written what this rank goes on from

    def snapshot(self) -> bytes | None:
        self._drew_globally = self._drew_globally or backends.drew_globally()
        if self._drew_globally or (self._drawing_ops is not None and self._drawing_ops.found is not False):
            return None
        judged = self._judged if self._is_ahead else None
        if (raw := self._on.raw(self.model, self._own_variables, judged)) is None:
            return None
        drawn = self._generators.take(*(part.tobytes() for part in self._randomness()))
        return pickle.dumps((drawn, raw), pickle.HIGHEST_PROTOCOL)

    def restore(self, snapshot: bytes) -> None:
        def refuse(tensor: Any) -> Any:
            raise SyncError("a metric gathers rows of all workers, and one of them was lost meanwhile.")

        drawn, raw = pickle.loads(snapshot)
        values, judged = self._on.from_raw(raw) if self._on.READS_AHEAD else raw
        for variable, value in zip(self._own_variables, values, strict=True):
            variable.assign(value)
        if judged is not None:
            with gathering(refuse):
                self.model.compute_metrics(None, *judged)
        self._drawn = [np.frombuffer(bytearray(part), np.uint8) for part in OwnGenerators.put_back(drawn)]
        if self._drawn:
            self._on.restore_randomness(self._drawn)  # for the end of an epoch; a step restores it once more

    def _randomness(self) -> list[Array]:
        """Of the backend's own generators, which those that compile steps do not have."""
        return self._on.randomness() if self._on.READS_AHEAD else []

    @cached_property
    def _own_variables(self) -> list[Any]:
        return [*self.model.non_trainable_variables, *self.model.metrics_variables]

    def send_steps(self, learn: Callable[[Sequence[Array], float], list[Array]]) -> None:
        """Let `learn` move the parameters instead of the optimizer, within `fit`, too."""
        refuse_own_step(self.model, self.keras)
        self._leave_graphs()
        self._exchange = gradient_hook.send_steps(
            self.model, learn, self.spec.backend, may_idle=self.may_idle
        )

    def _leave_graphs(self) -> None:
        if getattr(self.model, "jit_compile", False) and self.spec.backend == "tensorflow":
            self.model.jit_compile = False  # XLA cannot leave the graph for the exchange

    remembering = staticmethod(callbacks.CallbackState)

    def hooks(self, user_callbacks: Sequence[Any], watch: Any, **params: int) -> Any:
        return callbacks.make_hooks(
            self.keras, user_callbacks, model=self.model, watch=watch, rank=self.rank, **params
        )

    def look_at(self, batch: Batch) -> None:
        def within(row: int) -> str:
            return f"{row} of the {batch.rows} that worker {self.rank} has in a step"

        self._arranged.check(batch.labels, batch.where or within)

    def train_step(self, batch: Batch) -> None:
        self.look_at(batch)
        if batch.global_rows:
            with instead(self.model, "reset_metrics", lambda: None):  # it would with every single batch
                self.model.train_on_batch(*self._arranged.batch(batch.features, batch.labels))
            self._count(batch)
            self.step += 1

    def eval_step(self, batch: Batch) -> None:
        self.look_at(batch)
        if batch.rows:
            with instead(self.model, "reset_metrics", lambda: None):  # it would with every single batch
                self.model.test_on_batch(*self._arranged.batch(batch.features, batch.labels))
            self.tallies.rows += batch.rows

    def _named(self, *groups: str) -> dict[str, dict[str, Any]]:
        """The variables themselves by position and path, which several may share."""
        named = {}
        for group in groups or ("parameters", "buffers"):
            trained = group == "parameters"
            variables = self.model.trainable_variables if trained else self._variables.buffers()
            named[group] = {f"{place} {path_of(v)}": v for place, v in enumerate(variables)}
        return named

    def variables(self, *groups: str) -> Variables:
        """Parameters and buffers; the optimizer's are in `state`."""
        self._sync_jax()
        named = self._named(*groups).items()
        return {group: {name: value_of(v) for name, v in part.items()} for group, part in named}

    def assign(self, variables: Mapping[str, Mapping[str, Array]]) -> None:
        self._sync_jax()
        named = self._named(*variables)
        for group, arrays in variables.items():
            for name, array in arrays.items():
                named[group][name].assign(array)

    def names(self) -> list[str]:
        return list(self._named("parameters")["parameters"])

    def _means_of_variances(self) -> dict[str, str]:
        names = {id(variable): name for name, variable in self._named("buffers")["buffers"].items()}
        pairs = variances(self.model).items()
        return {names[v]: names[id(mean)] for v, mean in pairs if v in names and id(mean) in names}

    def gradients(self, batch: Batch) -> Gradients:
        refuse_own_step(self.model, self.keras)
        self._sync_jax()
        self.look_at(batch)
        like = self.read()
        if not batch.rows:
            return Gradients([np.zeros_like(array) for array in like], 0.0)
        inputs, targets, weights = (*self._arranged.batch(batch.features, batch.labels), None, None)[:3]
        arrays = self._on.gradients(self.model, inputs, targets, weights)
        self._count(batch)
        whole = [np.zeros_like(b) if a is None else np.asarray(a) for a, b in zip(arrays, like, strict=True)]
        return Gradients(whole, float(batch.rows))

    def apply(self, gradients: Sequence[Array | None]) -> None:
        self._sync_jax()
        pairs = zip(gradients, self.model.trainable_variables, strict=True)
        present = [(grad, variable) for grad, variable in pairs if grad is not None]
        self._on.apply(self.model.optimizer, [g for g, _ in present], [v for _, v in present])
        self.step += 1

    def join_parts(self, states: Sequence[bytes], owned: Sequence[Sequence[int]]) -> bytes:
        """The first server's state, with what the others have changed.

        This replica's optimizer never moved, so a server with a different value has changed it.
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
        """Empty if a schedule sets the rate."""
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
        feed: Any,
        hooks: Any,
        *,
        epochs: tuple[int, int],
        class_weight: Mapping[int, float] | None = None,
        ends: bool = True,
    ) -> None:
        """`feed.batch(number)` gives the features and labels of one step, counted from 0 in each epoch."""
        self._try_loss(feed)
        batch, data = self._dataset(feed)
        optimizer = self.model.optimizer
        average = getattr(optimizer, "finalize_variable_values", None)

        def at_its_end(variables: Any) -> None:  # which Keras on JAX also calls when a step fails
            if average is not None and ends and sys.exc_info()[0] is None:
                average(variables)

        with (
            batch.unwrapped(),
            nullcontext() if self._exchange is None else self._exchange.unwrapped(),
            # `fit` replaces weights by their moving averages.
            instead(optimizer, "finalize_variable_values", at_its_end),
            self._on.fitting() if self.spec.backend == "torch" else nullcontext(),
        ):
            self.model.fit(
                data,
                initial_epoch=epochs[0],
                epochs=epochs[1],
                callbacks=hooks,
                class_weight=class_weight,
                verbose=0,
                shuffle=False,
            )

    def _dataset(self, feed: Any) -> tuple[HostCode, Any]:
        batch = HostCode(lambda number: self._arranged.batch(*feed.batch(number)))
        return batch, dataset(self.keras, self.spec.backend, batch, len(feed), varies=feed.varies)

    def _try_loss(self, feed: Any) -> None:
        if self._tried or self._others is None:
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

    def evaluate(self, feed: Any, hooks: Any = None) -> None:
        """The results stay in the metrics, for `tallies`."""
        if not len(feed):
            self.model.reset_metrics()
            return
        batch, data = self._dataset(feed)
        with batch.unwrapped():
            self.model.evaluate(data, verbose=0, callbacks=hooks, return_dict=True)

    def begin_epoch(self, epoch: int) -> None:
        """Dropout differs between ranks and epochs; a resumed epoch is the same."""
        if self._others is not None:
            fork_seeds(self.model, self.seed, epoch, self.rank)
        super().begin_epoch(epoch)
        self._drawn = []
        # The user's own code draws other numbers on every rank and in every epoch.
        backends.seed_everything(self.spec.backend, seed_of(self.seed, epoch, self.rank), compiled=False)
        if self._drawing_ops is not None:
            self._drawing_ops.begin_epoch()

    def begin_step(self) -> None:
        """Restore randomness only here: Keras itself draws when it opens its dataset."""
        if self._drawn:
            self._on.restore_randomness(self._drawn)
            self._drawn = []

    def keep_step(self) -> None:
        self._sync_jax()
        counted = [value_of(variable) for variable in self.tallies.variables]
        self._kept = (self._variables.read(), counted)

    def step_is_finite(self) -> bool:
        return all(bool(np.isfinite(array).all()) for array in self.read() if array.dtype.kind == "f")

    def undo_step(self) -> None:
        self._sync_jax()
        arrays, counted = self._kept
        self._variables.assign(arrays)
        for variable, value in zip(self.tallies.variables, counted, strict=True):
            variable.assign(value)

    def take_tallies(self) -> bytes:
        part = self.tallies.take()
        self.tallies.reset()
        return part

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        figures = self.tallies.load(self.tallies.joined(tallies))
        figures["num_samples"] = self.tallies.rows
        self.tallies.reset()
        return figures

    def learning_rate(self) -> float:
        rate = self.model.optimizer.learning_rate
        if callable(rate):  # Keras 2 leaves a schedule to be called
            rate = rate(self.model.optimizer.iterations)
        return float(np.asarray(rate))

    def freeze(self) -> Callable[[], Sequence[Buffer]]:
        self._sync_jax()
        if self._compiled and self.model.built:
            self._build_optimizers()  # the user may have compiled the model anew
        variables, arrays = self._variables, self._variables.read()
        fields = {
            "epoch": self.epoch,
            "step": self.step,
            "names": variables.names(),
            "own": len(variables.own()),
            "signature": self._signature,
            "features": self._features,
        }
        return lambda: [pack(fields, arrays)]

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        fields, arrays = unpack(data)
        self._build_from(fields["signature"], fields["features"])
        variables = self._variables
        if weights_only_model or not self._compiled:
            count = len(variables.own())
            variables.assign(arrays[:count], fields["names"][:count], only_own=True)
            return
        variables.assign(arrays, fields["names"])
        self.epoch, self.step = fields["epoch"], fields["step"]

    def _local_variables(self) -> list[Any]:
        return [*self._variables.buffers(seeds=True), *self.tallies.variables]

    def local_state(self) -> bytes:
        self._sync_jax()
        arrays = [value_of(variable) for variable in self._local_variables()]
        fields = {"own": own_states(), "rows": self.epoch_rows}
        return pack(fields, [*arrays, *self._randomness()])

    def load_local_state(self, data: bytes) -> None:
        """Call after `load_state`."""
        fields, arrays = unpack(data)
        if "own" in fields:
            restore_own(fields["own"])
        variables = self._local_variables()
        for variable, array in zip(variables, arrays[: len(variables)], strict=True):
            variable.assign(array)
        self._drawn = arrays[len(variables) :]

    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None:
        unpacked = [unpack(data) for data in states]
        places = [id(v) for v in self._variables.buffers(seeds=True)]
        named = self._named("buffers")["buffers"].items()
        parts = [{name: arrays[places.index(id(v))] for name, v in named} for _, arrays in unpacked]
        # Files of before have no rows: ranks had even shares.
        rows = [int(fields.get("rows", 1)) for fields, _ in unpacked]
        self.assign({"buffers": merge_parts(parts, rows, self._means_of_variances())})
        if self.rank == 0:
            self.tallies.load_sum([arrays[len(places) :] for _, arrays in unpacked])
        seed_own(self.seed, self.epoch, self.rank, self.step)
        if size > 1:
            fork_seeds(self.model, self.seed, self.epoch, self.rank, self.step)
        if self.spec.backend == "torch":
            self._on.seed(seed_of(self.seed, self.epoch, self.rank, self.step))
            self._drawn = self._randomness()

    def save(self, path: str) -> None:
        """`.keras`, `.h5`, `.weights.h5`, or a folder for serving."""
        self._sync_jax()
        files.save(self.model, path, flavour=self.flavour)

    def load(self, path: str) -> None:
        if self._compiled and self.model.built:
            self._build_optimizers()  # so that the state has all that workers will look for
        files.load_into(self.model, path, self.keras, specs.custom_objects(self.model, self.flavour))

    def predict(self, features: Sequence[Array]) -> list[Array]:
        outputs = self.model.predict_on_batch(with_text(self._arranged.inputs(features)))
        named = list(_leaves(outputs))
        self.output_names = tuple(name for name, _ in named) if isinstance(outputs, Mapping) else None
        return [np.asarray(part) for _, part in named]

    def export(self, form: str, path: str, features: Sequence[Array]) -> None:
        self._sync_jax()
        backend = "tf_keras" if self.flavour == "tf_keras" else self.spec.backend
        export(self.model, form, path, backend=backend, features=features)

    def trained_model(self) -> Any:
        self._sync_jax()
        return self.model

    def weights(self) -> bytes:
        with Folder("kindler-weights-") as folder:
            path = folder / "model.weights.h5"
            self.save(str(path))
            return path.read_bytes()

    def load_weights(self, data: bytes) -> None:
        with Folder("kindler-weights-") as folder:
            path = folder / "model.weights.h5"
            path.write_bytes(data)
            self.load(str(path))

    @property
    def _compiled(self) -> bool:
        return backends.is_compiled(self.model)

    def _sync_jax(self) -> None:
        """JAX trains on a copy of the variables; bring them up to date."""
        if self.spec.backend == "jax" and getattr(self.model, "_jax_state", None):
            self.model.jax_state_sync()

    def _build_from(self, signature: Sequence[Sequence[Any]], features: Sequence[str]) -> None:
        self._features = list(features)
        if signature and not (self.model.built and self.model.variables):
            arrays = [zeros((1, *shape), dtype) for dtype, shape in signature]
            arranged = Arranged(self.model, inputs=self.spec.inputs, features=features, labels=())
            self.model(with_text(arranged.inputs(arrays)))
        self._signature = [(dtype, tuple(shape)) for dtype, shape in signature]
        if self._compiled:
            self._build_optimizers()

    def _build_optimizers(self) -> None:
        for optimizer in optimizers(self.model):
            if not getattr(optimizer, "built", False):
                optimizer.build(self.model.trainable_variables)


class _Parts:
    varies = True

    def __init__(self, batch: Batch, parts: Sequence[slice]) -> None:
        self._batch, self._parts = batch, parts

    def __len__(self) -> int:
        return len(self._parts)

    def batch(self, number: int) -> tuple[Any, Any]:
        part, whole = self._parts[number], self._batch
        return [array[part] for array in whole.features], [array[part] for array in whole.labels]


def _leaves(outputs: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(outputs, Mapping):
        parts = list(outputs.items())
    elif isinstance(outputs, list | tuple):
        parts = list(enumerate(outputs))
    else:
        yield name, outputs
        return
    for key, part in parts:
        yield from _leaves(part, f"{name}_{key}" if name else str(key))
