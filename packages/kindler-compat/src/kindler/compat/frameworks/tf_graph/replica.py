"""A TensorFlow graph: one replica of it, in a session of its own on workers, in the user's on the driver.

What the user passes becomes a spec in `build.py`, which `spec.py` carries to the workers; the operations of a
step are made in `training.py` and called through `calls.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kindler.collective import Array, Collective, Gradients
from kindler.compat.frameworks.tf_graph import files
from kindler.compat.frameworks.tf_graph.build import make_spec
from kindler.compat.frameworks.tf_graph.calls import Calls
from kindler.compat.frameworks.tf_graph.feeds import Feeds, unbatched
from kindler.compat.frameworks.tf_graph.randomness import draw_of, seed_of
from kindler.compat.frameworks.tf_graph.session import worker_config
from kindler.compat.frameworks.tf_graph.spec import GraphSpec, dumps, opened, unpacked
from kindler.compat.frameworks.tf_graph.variables import Values
from kindler.errors import ConfigError
from kindler.frameworks.base import BaseReplica
from kindler.frameworks.contract import Batch
from kindler.frameworks.devices import is_installed
from kindler.frameworks.rng import own_states, restore_own, seed_own
from kindler.frameworks.state_format import Buffer, pack, unpack


def preload() -> None:
    """Import what is slow to import; the process can be forked afterwards."""
    import tensorflow.compat.v1  # noqa: F401


class GraphReplica(BaseReplica):
    """One rank's copy of a graph; keeps the contracts `DriverModel` and `Stepper`.

    Args:
        spec: The graph, in a session.
        device: Where the session computes; decided when it was made.
        rank: This rank.
        local_rank: Its number on its host.
        seed: What random numbers begin with.
        threads: Threads of the session; decided when it was made.
        feature_names: Names of the columns that inputs are fed from.
        label_names: Names of the columns that labels are fed from.
        label_shapes: Not needed: a loss is a mean over rows.
    """

    def __init__(
        self,
        spec: GraphSpec,
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
        self.ends, self.sess = spec.ends, spec.sess
        self.model, self.optimizer = spec.sess, spec.optimizer or None
        ends, graph = self.ends, spec.graph
        self._features = Feeds(graph, ends.inputs, feature_names, named=ends.named_inputs, what="inputs")
        self._labels = Feeds(graph, ends.labels, label_names, named=ends.named_labels, what="labels")
        self._calls = Calls(spec.sess, ends, inputs=self._features.tensors, labels=self._labels.tensors)
        self._values = Values(spec.sess, ends.variables)
        self._by_name = {variable.name: variable for variable in ends.variables}
        self.epoch_rows = 0
        self._collective: Collective | None = None
        self._before: dict[str, bytes] = {}
        self._drawing = [seed_of(seed, 0, rank), 0]

    dumps = staticmethod(dumps)

    @classmethod
    def make_spec(cls, **options: Any) -> GraphSpec:
        """A spec of the arguments of `Estimator.from_graph`; or `spec`, one that was made already."""
        made: GraphSpec | None = options.pop("spec", None)
        return make_spec(**options) if made is None else made

    @classmethod
    def loads(cls, data: bytes) -> GraphSpec:
        """The graph in a new session, with the values it travelled with."""
        return opened(unpacked(data))

    @classmethod
    def from_bytes(cls, spec: bytes, **options: Any) -> GraphReplica:
        """A replica in a session that is configured for this rank."""
        packed = unpacked(spec)
        config = worker_config(
            packed.session_config,
            device=options.get("device", "cpu"),
            local_rank=options.get("local_rank", 0),
            threads=options.get("threads"),
        )
        numbers = {name: options.get(name, 0) for name in ("seed", "rank")}
        return cls(opened(packed, config, **numbers), **options)

    @property
    def on_gpu(self) -> bool:
        """Whether the session has a GPU."""
        return any(device.device_type == "GPU" for device in self.sess.list_devices())

    @classmethod
    def may_use_gpus(cls, spec: GraphSpec) -> bool:
        """Whether what TensorFlow needs for GPUs is installed with it."""
        return is_installed("nvidia")

    @classmethod
    def has_instance(cls, spec: GraphSpec) -> bool:
        """The user's session gets the trained values."""
        return True

    @classmethod
    def lacking(cls, spec: GraphSpec, *names: str) -> list[str]:
        """An optimizer to train with, a loss or metrics to judge by."""
        complaints = []
        if "optimizer" in names and spec.ends.training is None:
            complaints.append("there is no optimizer; pass optimizer=... (or train_op=...) to from_graph.")
        judged = spec.ends.loss or ((spec.ends.metrics or spec.ends.streamed) and "optimizer" not in names)
        if "loss" in names and not judged:
            complaints.append("there is no loss; pass loss=..., a scalar tensor, to from_graph.")
        return complaints

    @classmethod
    def needs_labels(cls, spec: GraphSpec) -> bool:
        """Whether there are placeholders for them."""
        return bool(spec.ends.labels)

    @classmethod
    def against_data(cls, spec: GraphSpec, data: Any) -> list[str]:
        """A `tf.data.Dataset` whose elements are rows."""
        return unbatched(spec.graph, spec.ends, data)

    @classmethod
    def environment(cls, spec: GraphSpec) -> tuple[tuple[str, str], ...]:
        """Less noise in the workers' output."""
        return (("TF_CPP_MIN_LOG_LEVEL", os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")),)

    def names(self) -> list[str]:
        """The trained variables."""
        training = self.ends.training
        return [] if training is None else [parameter.variable for parameter in training.parameters]

    def read(self) -> list[Array]:
        """Copies of the trained variables."""
        return self._values.read(self.names())

    def write(self, arrays: Sequence[Array]) -> None:
        """Overwrite the trained variables."""
        self._values.assign({name: np.array(a) for name, a in zip(self.names(), arrays, strict=True)})

    def join(self, collective: Collective) -> None:
        """Start from rank 0's state."""
        self._collective = collective
        super().join(collective)

    def begin_epoch(self, epoch: int) -> None:
        """Remember what training changes besides parameters, as it is now."""
        super().begin_epoch(epoch)
        self.epoch_rows, self._calls.epoch = 0, epoch
        self._drawing = [seed_of(self.seed, epoch, self.rank), 0]
        if self._collective is not None and self._collective.size > 1:
            names = self._buffers()
            self._before = {n: v.tobytes() for n, v in zip(names, self._values.read(names), strict=True)}

    def train_step(self, batch: Batch) -> None:
        """Gradients and their application in one call of the session."""
        if batch.rows:
            self._draw()
            judged = self._calls.step(*self._fed(batch))
            self._count(batch, judged)
            self.step += 1

    def gradients(self, batch: Batch) -> Gradients:
        """All gradients in one call of the session, which also runs the updates."""
        parameters = self.ends.training.parameters if self.ends.training is not None else ()
        if not batch.rows:
            return Gradients([self._zeros(parameter.variable) for parameter in parameters], 0.0)
        self._draw()
        results = self._calls.gradients(*self._fed(batch))
        judged = len(self._calls.judged)
        self._count(batch, results)
        arrays = results[judged : judged + len(parameters)]
        indices = iter(results[judged + len(parameters) :])
        dense = [
            self._dense(parameter.variable, array, next(indices)) if parameter.indices else np.asarray(array)
            for parameter, array in zip(parameters, arrays, strict=True)
        ]
        return Gradients(dense, float(batch.rows))

    def apply(self, gradients: Sequence[Array]) -> None:
        """One step of the optimizer with these gradients in the place of its own."""
        parameters = self.ends.training.parameters if self.ends.training is not None else ()
        fed: list[Array] = []
        indices: list[Array] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.indices:
                # Rows that no rank has used are left alone, as the optimizer leaves them in one process.
                rows = np.flatnonzero(gradient.reshape(len(gradient), -1).any(axis=1))
                tensor = self.spec.graph.get_tensor_by_name(parameter.indices)
                indices.append(rows.astype(tensor.dtype.as_numpy_dtype))
                gradient = gradient[rows]
            fed.append(gradient)
        self._calls.apply(*fed, *indices)
        self.step += 1

    def eval_step(self, batch: Batch) -> None:
        """Judge a batch."""
        if batch.rows:
            self._calls.draw = draw_of(seed_of(self.seed, 0, self.rank), int(self._rows))
            self._count(batch, self._calls.judge(*self._fed(batch)), trains=False)

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        """The outputs for these rows."""
        ports = self.ends.outputs
        if not ports:
            raise ConfigError("there is nothing to predict; pass outputs=... to from_graph.")
        self._draw()
        outputs = [np.asarray(part) for part in self._calls.predict(*self._features.arrays(features))]
        rows = len(features[0])
        for port, output in zip(ports, outputs, strict=True):
            if output.ndim == 0 or len(output) != rows:
                raise ConfigError(
                    f"the output {port.tensor!r} has the shape {output.shape} for {rows} rows; it must have"
                    " one row for each of them."
                )
        self.output_names = tuple(port.name for port in ports) if self.ends.named_outputs else None
        return outputs

    def learning_rate(self) -> float:
        """The rate of the next step, if the optimizer has one that is known."""
        training = self.ends.training
        if training is None or not training.rate:
            return float("nan")
        return float(self._calls.rate()[0])

    def merge_buffers(self) -> None:
        """Make what updates changed (BatchNorm's statistics) the same on all ranks.

        Floating point becomes the mean by rows; a "moving_variance" becomes the variance of all ranks' rows
        about the joint "moving_mean". Anything else becomes rank 0's.
        """
        if self._collective is None or self._collective.size == 1:
            return
        names = self._buffers()
        own = dict(zip(names, self._values.read(names), strict=True))
        mine = [self._before.get(name) != own[name].tobytes() for name in names]
        if not names:
            return
        [flags] = self._collective.sum([np.array(mine, np.float32)])
        changed = [name for name, flag in zip(names, flags, strict=True) if flag]
        floats = [name for name in changed if own[name].dtype.kind == "f"]
        merged = dict(zip(floats, self._means([own[name] for name in floats]), strict=True))
        spreads = [name for name in floats if _mean_of(name) in merged]
        about = [own[n] + np.square(own[_mean_of(n)] - merged[_mean_of(n)]) for n in spreads]
        merged |= dict(zip(spreads, self._means(about), strict=True))
        others = [name for name in changed if name not in merged]
        if others:
            taken = self._collective.broadcast([own[name] for name in others])
            merged |= dict(zip(others, taken, strict=True))
        self._values.assign(merged)

    def take_tallies(self) -> bytes:
        """Sums, and what streamed metrics have counted."""
        tallies = self._tallies()
        self._rows, self._sums = 0.0, {}
        self._reset_streams()
        return tallies

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        """Sums of sums, divided once; counts of streamed metrics are added up."""
        parts = [unpack(part) for part in tallies]
        figures = super().merge_tallies([head for head, _ in parts])
        names = self._stream_variables()
        if names:
            self._values.assign(dict(zip(names, self._summed([b for _, b in parts]), strict=True)))
            results = self._calls.results()
            pairs = zip(self.ends.streamed, results, strict=True)
            figures |= {metric.name: float(result) for metric, result in pairs}
            self._reset_streams()
        return figures

    def freeze(self) -> Callable[[], Sequence[Buffer]]:
        """A copy of every variable; the function makes bytes of it later."""
        names, arrays = [v.name for v in self.ends.variables], self._values.read()
        head = {"epoch": self.epoch, "step": self.step, "variables": _described(names, arrays)}
        return lambda: pack(json.dumps(head).encode(), [_raw(array) for array in arrays])

    def state(self) -> bytes:
        """Every variable, the optimizer's included, epoch and step."""
        return b"".join(self.freeze()())

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        """Go on from `state`; or take the model's own variables from it.

        Raises:
            ConfigError: It is the state of another graph.
        """
        head, buffers = unpack(data)
        fields = json.loads(head)
        values = _revived(fields["variables"], buffers)
        wanted = [v.name for v in self.ends.variables if not weights_only_model or v.name in self.ends.model]
        missing = [name for name in wanted if name not in values]
        if missing:
            raise ConfigError(
                f"this state has no variable {missing[0]!r}; it has {sorted(values)[:8]}. They are not of the"
                " same graph and optimizer."
            )
        self._values.assign({name: values[name] for name in wanted})
        if not weights_only_model:
            self.epoch, self.step = fields["epoch"], fields["step"]

    def local_state(self) -> bytes:
        """Randomness, tallies, and this rank's own buffers."""
        names = [*self._buffers(), *self._stream_variables()]
        arrays = self._values.read(names)
        head = {
            "own": own_states(),
            "tallies": [self._rows, self._sums],
            "epoch_rows": self.epoch_rows,
            "drawing": self._drawing,
            "variables": _described(names, arrays),
        }
        return b"".join(pack(json.dumps(head).encode(), [_raw(array) for array in arrays]))

    def load_local_state(self, data: bytes) -> None:
        """Go on as this rank."""
        head, buffers = unpack(data)
        fields = json.loads(head)
        restore_own(fields["own"])
        self._rows, self._sums = fields["tallies"]
        self.epoch_rows, self._drawing = fields["epoch_rows"], fields["drawing"]
        self._values.assign(_revived(fields["variables"], buffers))

    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None:
        """Buffers are merged by the rows that each rank had; the first rank counts for all."""
        parts = [unpack(data) for data in states]
        heads = [json.loads(head) for head, _ in parts]
        known = [_revived(h["variables"], b) for h, (_, b) in zip(heads, parts, strict=True)]
        weights = np.array([head["epoch_rows"] for head in heads], np.float64)
        weights = weights / weights.sum() if weights.sum() else np.full(len(heads), 1 / len(heads))
        merged: dict[str, Array] = {}
        for name in self._buffers():
            values = [part[name] for part in known]
            merged[name] = _weighted(values, weights) if values[0].dtype.kind == "f" else values[0]
        for name in [n for n in merged if _mean_of(n) in merged]:
            mean = _mean_of(name)
            spread = [part[name] + np.square(part[mean] - merged[mean]) for part in known]
            merged[name] = _weighted(spread, weights)
        streams = self._stream_variables()
        for name in streams:
            total = np.sum([part[name] for part in known], axis=0)
            merged[name] = total if self.rank == 0 else np.zeros_like(known[0][name])
        self._values.assign(merged)
        if self.rank == 0:
            tallies = [head["tallies"] for head in heads]
            self._rows = sum(rows for rows, _ in tallies)
            self._sums = {
                name: sum(sums.get(name, 0.0) for _, sums in tallies) for _, sums in tallies for name in sums
            }
        seed_own(self.seed, self.epoch, self.rank, self.step)
        self._drawing = [seed_of(self.seed, self.epoch, self.rank, self.step), 0]

    def trained_model(self) -> Any:
        """The session, whose graph is `sess.graph`."""
        return self.sess

    def stored_model(self) -> GraphSpec:
        """The graph and its session, with what is fed and fetched."""
        spec: GraphSpec = self.spec
        return spec

    def save(self, path: str) -> None:
        """Write a SavedModel; its folder `variables` is a checkpoint that `tf.train.Saver` restores, too."""
        files.save(self.spec, path)

    def load(self, path: str) -> None:
        """Take variables from what `save` or a `tf.train.Saver` wrote."""
        self._values.assign(files.read(self.spec, path))

    def _draw(self) -> None:
        """Let random operations draw something new in the next call."""
        seed, count = self._drawing
        self._calls.draw, self._drawing = draw_of(seed, count), [seed, count + 1]

    def _fed(self, batch: Batch) -> list[Array]:
        where = batch.where
        return [
            *self._features.arrays(batch.features, where),
            *self._labels.arrays(batch.labels, where),
        ]

    def _count(self, batch: Batch, judged: Sequence[Any], *, trains: bool = True) -> None:
        names = (["loss"] if self.ends.loss else []) + [port.name for port in self.ends.metrics]
        for name, value in zip(names, judged, strict=False):
            mean = float(value) if np.ndim(value) == 0 else float(np.mean(value))
            self._sums[name] = self._sums.get(name, 0.0) + mean * batch.rows
        self._rows += batch.rows
        if trains:
            self.epoch_rows += batch.rows

    def _buffers(self) -> list[str]:
        """What updates change besides parameters: variables of the model that no gradient moves."""
        trained = set(self.names()) | set(self._stream_variables())
        return [v.name for v in self.ends.variables if v.name in self.ends.model and v.name not in trained]

    def _means(self, arrays: list[Array]) -> list[Array]:
        if not arrays or self._collective is None:
            return []
        return self._collective.mean(arrays, float(self.epoch_rows))

    def _zeros(self, name: str) -> Array:
        variable = self._by_name[name]
        shape = variable.shape if variable.shape is not None else self._values.read([name])[0].shape
        return np.zeros(shape, np.dtype(variable.dtype))

    def _dense(self, name: str, values: Array, indices: Array) -> Array:
        dense = self._zeros(name)
        np.add.at(dense, indices, values)
        return dense

    def _tallies(self) -> bytes:
        arrays = self._values.read(self._stream_variables())
        head = json.dumps([self._rows, self._sums]).encode()
        return b"".join(pack(head, [_raw(array.astype(np.float64)) for array in arrays]))

    def _stream_variables(self) -> list[str]:
        return list(dict.fromkeys(name for metric in self.ends.streamed for name in metric.variables))

    def _summed(self, parts: Sequence[Sequence[memoryview]]) -> list[Array]:
        names = self._stream_variables()
        shapes = [self._zeros(name).shape for name in names]
        return [
            np.sum([np.frombuffer(part[place], np.float64) for part in parts], axis=0).reshape(shape)
            for place, shape in enumerate(shapes)
        ]

    def _reset_streams(self) -> None:
        names = self._stream_variables()
        if names:
            self._values.assign({name: self._zeros(name) for name in names})


def _mean_of(name: str) -> str:
    return name.replace("moving_variance", "moving_mean") if "moving_variance" in name else ""


def _weighted(values: Sequence[Array], weights: Array) -> Array:
    return np.tensordot(weights, np.stack(values).astype(np.float64), axes=1).astype(values[0].dtype)


def _raw(array: Array) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def _described(names: Sequence[str], arrays: Sequence[Array]) -> list[tuple[str, str, list[int]]]:
    return [(n, a.dtype.name, list(a.shape)) for n, a in zip(names, arrays, strict=True)]


def _revived(described: Sequence[Any], buffers: Sequence[Buffer]) -> dict[str, Array]:
    return {
        name: np.frombuffer(buffer, np.dtype(dtype)).reshape(shape)
        for (name, dtype, shape), buffer in zip(described, buffers, strict=True)
    }
