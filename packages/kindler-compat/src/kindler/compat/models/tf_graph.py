"""TensorFlow graphs of estimators, as plain files: looked through first, for they are programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from kindler import Estimator
from kindler.compat.frameworks.tf_graph import files
from kindler.compat.frameworks.tf_graph.spec import GraphSpec
from kindler.errors import ConfigError
from kindler.frameworks.keras import backends
from kindler.frameworks.keras.backends import settled
from kindler.models.estimator import FrameworkKind
from kindler.models.kind import require_trust
from kindler.models.predictor import Predictor, free_rows
from kindler.models.safety.saved_model import graph_dangers
from kindler.models.signature import Arrays, Signature, TensorSpec


class GraphKind(FrameworkKind):
    """What `Estimator.from_graph` holds: a graph in a session, and what of it is fed and fetched.

    Without `training`, the optimizer and its variables stay behind.
    """

    kind: ClassVar[str] = "tf_graph"
    put_options: ClassVar[frozenset[str]] = frozenset({"training"})
    to_predict: ClassVar[Mapping[str, Any]] = {"training": False}
    packages: ClassVar[tuple[str, ...]] = ("tensorflow",)

    def can(self, obj: Any) -> bool:
        return isinstance(obj, GraphSpec)

    def write(self, obj: Any, folder: Path, *, trusted: bool, training: bool = True, **options: Any) -> Any:
        files.write_plain(obj if training else files.without_training(obj), folder)
        _check(folder, trusted=trusted)
        return {}

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        _check(folder, trusted=trusted)
        return files.read_plain(folder)

    def estimator(self, **options: Any) -> Estimator:
        spec, config = options.pop("model"), options.pop("config", None) or {}
        return Estimator.from_framework("tf_graph", spec=replace(spec, config=config), **options)

    def settle(self, device: str, meta: Mapping[str, Any]) -> None:
        self.device = settled("tensorflow", device)

    def device_bytes(self, meta: Mapping[str, Any]) -> int:
        return backends.on("tensorflow").taken_bytes() if self.device == "cuda" else 0

    def predictor(self, model: Any) -> Predictor:
        return GraphPredictor(model)


def _check(folder: Path, *, trusted: bool) -> None:
    found = [] if trusted else graph_dangers(files.meta_graph(folder))
    if found:
        require_trust(trusted, what="the TensorFlow graph", reason=f"it has {', '.join(found)}")


class GraphPredictor(Predictor):
    """Fetches the outputs of a graph."""

    def __init__(self, spec: GraphSpec) -> None:
        ends, graph = spec.ends, spec.graph
        if not ends.outputs:
            raise ConfigError("the graph has no outputs; pass outputs=... to from_graph.")
        inputs = [_spec(port, graph, "input", number) for number, port in enumerate(ends.inputs)]
        outputs = [_spec(port, graph, "output", number) for number, port in enumerate(ends.outputs)]
        self._sess = spec.sess
        self._fed = {one.name: port.tensor for one, port in zip(inputs, ends.inputs, strict=True)}
        self._fetched = {one.name: port.tensor for one, port in zip(outputs, ends.outputs, strict=True)}
        self._constants = {tensor: value for tensor, _, value in ends.values}
        if ends.draws:
            self._constants[ends.draws] = [0, 0]
        self.signature = Signature(tuple(inputs), tuple(outputs))
        free = free_rows([one.shape for one in inputs], [one.shape for one in outputs])
        self.joins = None if free else False

    def call(self, inputs: Arrays, method: str) -> Arrays:
        fed = {self._fed[name]: array for name, array in inputs.items()}
        found: Arrays = self._sess.run(self._fetched, {**self._constants, **fed})
        return found


def _spec(port: Any, graph: Any, what: str, number: int) -> TensorSpec:
    tensor = graph.get_tensor_by_name(port.tensor)
    shape = None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
    return TensorSpec(port.name or f"{what}_{number}", tensor.dtype.base_dtype.name, shape)
