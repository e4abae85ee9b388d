"""A TensorFlow graph: one replica of it, in a session of its own on workers, in the user's on the driver.

`spec.py` makes a spec of what the user passes and carries it to the workers; the operations of a step are
made in `training.py` and called through `calls.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kindler.collective import Array, Batch, Gradients
from kindler.compat.frameworks import loads
from kindler.compat.frameworks.tf_graph import files
from kindler.compat.frameworks.tf_graph.calls import Calls, Feeds, unbatched
from kindler.compat.frameworks.tf_graph.ends import Values, worker_config
from kindler.compat.frameworks.tf_graph.spec import GraphSpec, draw_of, dumps, make_spec, opened, seed_of
from kindler.errors import ConfigError
from kindler.frameworks.base import BaseReplica, packed, unpacked
from kindler.frameworks.contract import Facts, Use, Variables
from kindler.frameworks.devices import is_installed


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
        return opened(loads(data))

    @classmethod
    def from_bytes(cls, spec: bytes, **options: Any) -> GraphReplica:
        """A replica in a session that is configured for this rank."""
        graph, known = loads(spec), {"device": "cpu", "local_rank": 0, "threads": None, **options}
        placed = {name: known[name] for name in ("device", "local_rank", "threads")}
        config = worker_config(graph.session_config, **placed)
        numbers = {name: options.get(name, 0) for name in ("seed", "rank")}
        return cls(opened(graph, config, **numbers), **options)

    @property
    def on_gpu(self) -> bool:
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
        trained, names = set(self.names()), [variable.name for variable in self.ends.variables]
        buffers = self.ends.model - trained - set(self._stream_variables())
        return [name for name in names if name not in trained and (name in buffers) == (group == "buffers")]

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
                        f"this state has no variable {name!r}; it has {sorted(found)[:8]}. They belong to "
                        "different graphs or optimizers."
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
            judged = self._calls("step", *self._fed(batch))
            self._count(batch, judged)
            self.step += 1

    def gradients(self, batch: Batch) -> Gradients:
        """All gradients in one call of the session, which also runs the updates."""
        parameters = self.ends.training.parameters if self.ends.training is not None else ()
        if not batch.rows:
            return Gradients([self._zeros(parameter.variable) for parameter in parameters], 0.0)
        self._draw()
        results = self._calls("gradients", *self._fed(batch))
        judged = len(self._calls.judged)
        self._count(batch, results)
        arrays = results[judged : judged + len(parameters)]
        indices = iter(results[judged + len(parameters) :])
        gradients = []
        for parameter, array in zip(parameters, arrays, strict=True):
            if parameter.indices:
                dense = self._zeros(parameter.variable)
                np.add.at(dense, next(indices), array)
                array = dense
            gradients.append(np.asarray(array))
        return Gradients(gradients, float(batch.rows))

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
        self._calls("apply", *fed, *indices)
        self.step += 1

    def eval_step(self, batch: Batch) -> None:
        if batch.rows:
            self._calls.draw = draw_of(seed_of(self.seed, 0, self.rank), int(self._rows))
            self._count(batch, self._calls("judge", *self._fed(batch)), trains=False)

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        ports = self.ends.outputs
        if not ports:
            raise ConfigError("there is nothing to predict; pass outputs=... to from_graph.")
        self._draw()
        outputs = [np.asarray(part) for part in self._calls("predict", *self._features.arrays(features))]
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
        training = self.ends.training
        if training is None or not training.rate:
            return float("nan")
        return float(self._calls("rate")[0])

    def _counted(self) -> Any:
        """Sums, and what streamed metrics have counted."""
        names = self._stream_variables()
        streams = zip(names, self._values.read(names), strict=True)
        return [self._rows, self._sums, {name: array.tolist() for name, array in streams}]

    def _count_on_from(self, counted: Sequence[Any]) -> None:
        super()._count_on_from([part[:2] for part in counted])
        sums = {
            name: np.sum([part[2][name] for part in counted], axis=0) if counted else self._zeros(name)
            for name in self._stream_variables()
        }
        self._values.assign(sums)

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        """Sums of sums, divided once; counts of streamed metrics are added up."""
        parts = [json.loads(part) for part in tallies]
        figures = super().merge_tallies([json.dumps(part[:2]).encode() for part in parts])
        if self.ends.streamed:
            kept = self._counted()
            self._count_on_from(parts)
            results = zip(self.ends.streamed, self._calls("results"), strict=True)
            figures |= {metric.name: float(result) for metric, result in results}
            self._count_on_from([kept])
        return figures

    def local_state(self) -> bytes:
        fields, groups = unpacked(super().local_state())
        return b"".join(packed({**fields, "drawing": self._drawing}, groups))

    def load_local_state(self, data: bytes) -> None:
        super().load_local_state(self._repacked(data))
        self._drawing = unpacked(data)[0]["drawing"]

    def join_local_states(self, states: Sequence[bytes], *, size: int) -> None:
        super().join_local_states([self._repacked(data) for data in states], size=size)
        if self.rank:  # rank 0 goes on with what all have counted
            self._count_on_from([])
        self._drawing = [seed_of(self.seed, self.epoch, self.rank, self.step), 0]

    def _repacked(self, data: bytes) -> bytes:
        """A local state; those of earlier versions have what metrics have counted among the variables."""
        fields, groups = unpacked(data)
        if "rows" in fields:
            return data
        known = {name: array for arrays in groups.values() for name, array in arrays.items()}
        streams = {name: known[name].tolist() for name in self._stream_variables()}
        fields |= {"rows": fields["epoch_rows"], "tallies": [*fields["tallies"], streams]}
        return b"".join(packed(fields, {"buffers": {name: known[name] for name in self._group("buffers")}}))

    def trained_model(self) -> Any:
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
        features = self._features.arrays(batch.features, batch.where)
        return [*features, *self._labels.arrays(batch.labels, batch.where)]

    def _count(self, batch: Batch, judged: Sequence[Any], *, trains: bool = True) -> None:
        names = (["loss"] if self.ends.loss else []) + [port.name for port in self.ends.metrics]
        self._rows += batch.rows
        for name, value in zip(names, judged, strict=False):
            self._sums[name] = self._sums.get(name, 0.0) + float(np.mean(value)) * batch.rows
        if trains:
            self.epoch_rows += batch.rows

    def _zeros(self, name: str) -> Array:
        variable = self._by_name[name]
        shape = variable.shape if variable.shape is not None else self._values.read([name])[0].shape
        return np.zeros(shape, np.dtype(variable.dtype))

    def _stream_variables(self) -> list[str]:
        return list(dict.fromkeys(name for metric in self.ends.streamed for name in metric.variables))
