"""A replica that predicts with OpenVINO."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NoReturn

from kindler.collective import Array
from kindler.errors import ConfigError
from kindler.frameworks.base import BaseReplica
from kindler.frameworks.openvino import graph
from kindler.frameworks.openvino.compiled import compiled
from kindler.frameworks.openvino.rows import RowCaller
from kindler.frameworks.openvino.spec import OpenvinoSpec, dumps, loads, make_spec


def preload() -> None:
    """Importing this module is the slow part; nothing is compiled, so no thread starts."""


class OpenvinoReplica(BaseReplica):
    """OpenVINO's device comes from the spec, not from `device`."""

    def __init__(
        self,
        spec: OpenvinoSpec,
        *,
        threads: int | None = None,
        feature_names: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        self._threads, self._features = threads, tuple(feature_names)
        self.output_names = spec.output_names

    dumps = staticmethod(dumps)
    loads = staticmethod(loads)

    @classmethod
    def make_spec(cls, **options: Any) -> OpenvinoSpec:
        return make_spec(**options)

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        names = self._features if len(self._features) == len(features) else [""] * len(features)
        return self._caller(self._caller.arranged(names, features))

    def trained_model(self) -> Any:
        return graph.read_ir(self.spec.xml, self.spec.weights, self.spec.name)

    def save(self, path: str) -> NoReturn:
        raise ConfigError(
            "save() writes one file, and a model of OpenVINO has two.\n"
            "Hint: to_openvino('model.xml') writes both; save('name.estimator') keeps the whole estimator."
        )

    def load(self, path: str) -> NoReturn:
        raise ConfigError(
            "a model of OpenVINO has its weights with it.\n"
            "Hint: Estimator.from_openvino(model_path=...) reads another one."
        )

    def state(self) -> bytes:
        return b""

    @cached_property
    def _caller(self) -> RowCaller:
        return RowCaller(compiled(self.spec, self._threads), self.spec.name)
