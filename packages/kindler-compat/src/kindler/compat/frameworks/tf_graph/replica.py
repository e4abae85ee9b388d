"""A TensorFlow graph: one replica of it, in a session of its own on workers, in the user's on the driver.

What the user passes becomes a spec in `build.py`, which `spec.py` carries to the workers; the operations of a
step are made in `training.py` and called through `calls.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kindler.collective import Array, Batch, Gradients
from kindler.compat.frameworks.tf_graph import files
from kindler.compat.frameworks.tf_graph.build import make_spec
from kindler.compat.frameworks.tf_graph.calls import Calls, Feeds, unbatched
from kindler.compat.frameworks.tf_graph.ends import Values, worker_config
from kindler.compat.frameworks.tf_graph.spec import GraphSpec, draw_of, dumps, opened, seed_of, unpacked
from kindler.errors import ConfigError
from kindler.frameworks.base import BaseReplica, packed
from kindler.frameworks.base import unpacked as unpacked_variables
from kindler.frameworks.contract import Facts, Use, Variables
from kindler.frameworks.devices import is_installed
from kindler.frameworks.merged_buffers import merge_parts
from kindler.frameworks.rng import own_states, restore_own, seed_own
from kindler.frameworks.state_format import pack, unpack


def preload() -> None:
    """Import what is slow to import; the process can be forked afterwards."""
    import tensorflow.compat.v1  # noqa: F401


class GraphReplica(BaseReplica):
    """One rank's copy of a graph."""

    def __init__(
        self,
        spec: GraphSpec,
        *,
        feature_names: Sequence[str] = (),
        label_names: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        self.ends, self.sess = spec.ends, spec.sess
        self.model, self.optimizer = spec.sess, spec.optimizer or None
        ends, graph = self.ends, spec.graph
        self._features = Feeds(graph, ends.inputs, feature_names, named=ends.named_inputs, what="inputs")
        self._labels = Feeds(graph, ends.labels, label_names, named=ends.named_labels, what="labels")
        self._calls = Calls(spec.sess, ends, inputs=self._features.tensors, labels=self._labels.tensors)
        self._values = Values(spec.sess, ends.variables)
        self._by_name = {variable.name: variable for variable in ends.variables}
        self._drawing = [seed_of(self.seed, 0, self.rank), 0]

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
    def facts(cls, spec: GraphSpec) -> Facts:
        return Facts(
            labels=bool(spec.ends.labels),
            gpus=is_installed("nvidia"),
            has_instance=True,  # the user's session gets the trained values
            environment=(("TF_CPP_MIN_LOG_LEVEL", os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")),),
        )

    @classmethod
    def complaints(cls, spec: GraphSpec, use: Use, value: Any = None) -> list[str]:
        if use == "data":
            return unbatched(spec.graph, spec.ends, value)
        if use not in ("train", "judge"):
            return super().complaints(spec, use, value)
        complaints = []
        if use == "train" and spec.ends.training is None:
            complaints.append("there is no optimizer; pass optimizer=... (or train_op=...) to from_graph.")
        judged = spec.ends.loss or ((spec.ends.metrics or spec.ends.streamed) and use == "judge")
        if not judged:
            complaints.append("there is no loss; pass loss=..., a scalar tensor, to from_graph.")
        return complaints

    def names(self) -> list[str]:
        training = self.ends.training
        return [] if training is None else [parameter.variable for parameter in training.parameters]

    def _group(self, group: str) -> list[str]:
        """The variables of a group: buffers are those of the model that updates change, and no gradient."""
        if group == "parameters":
            return self.names()
        trained, counted = set(self.names()), set(self._stream_variables())
        if group == "buffers":
            rest = trained | counted
            return [v.name for v in self.ends.variables if v.name in self.ends.model and v.name not in rest]
        known = trained | set(self._group("buffers"))
        return [v.name for v in self.ends.variables if v.name not in known]

    def variables(self, *groups: str) -> Variables:
        named = {group: self._group(group) for group in groups or ("parameters", "buffers", "optimizer")}
        values = iter(self._values.read([name for names in named.values() for name in names]))
        return {group: {name: next(values) for name in names} for group, names in named.items()}

    def assign(self, variables: Mapping[str, Mapping[str, Array]]) -> None:
        found = {name: array for arrays in variables.values() for name, array in arrays.items()}
        if "optimizer" in variables:
            for name in self._group("optimizer"):
                if name not in found:
                    raise ConfigError(
                        f"this state has no variable {name!r}; it has {sorted(found)[:8]}. They are not of"
                        " the same graph and optimizer."
                    )
        self._values.assign({name: np.array(a) for name, a in found.items() if name in self._by_name})

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self._calls.epoch = epoch
        self._drawing = [seed_of(self.seed, epoch, self.rank), 0]

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

    def local_state(self) -> bytes:
        """Randomness, tallies, and this rank's own buffers."""
        fields = {
            "own": own_states(),
            "tallies": self._counted(),
            "epoch_rows": self.epoch_rows,
            "drawing": self._drawing,
        }
        streams = self._stream_variables()
        counted = dict(zip(streams, self._values.read(streams), strict=True))
        return b"".join(packed(fields, {**self.variables("buffers"), "metrics": counted}))

    def load_local_state(self, data: bytes) -> None:
        fields, groups = unpacked_variables(data)
        restore_own(fields["own"])
        self._count_on_from([fields["tallies"]])
        self.epoch_rows, self._drawing = fields["epoch_rows"], fields["drawing"]
        self.assign(groups)

    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None:
        parts = [unpacked_variables(data) for data in states]
        known = [{n: a for group in groups.values() for n, a in group.items()} for _, groups in parts]
        rows = [fields["epoch_rows"] for fields, _ in parts]
        names = self._group("buffers")
        buffers = [{name: part[name] for name in names} for part in known]
        merged = merge_parts(buffers, rows, self._means_of_variances())
        for name in self._stream_variables():
            total = np.sum([part[name] for part in known], axis=0)
            merged[name] = total if self.rank == 0 else np.zeros_like(known[0][name])
        self.assign({"buffers": merged})
        if self.rank == 0:
            self._count_on_from([fields["tallies"] for fields, _ in parts])
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


def _raw(array: Array) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)
