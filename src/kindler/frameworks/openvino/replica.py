"""A replica that predicts with OpenVINO; a host compiles each model once, into a cache of the newest ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from kindler.collective import Array
from kindler.errors import ConfigError, DataError
from kindler.frameworks.base import BaseReplica
from kindler.frameworks.openvino import graph
from kindler.frameworks.openvino.graph import openvino, shape_of
from kindler.frameworks.openvino.rows import RowCaller, is_per_row
from kindler.frameworks.openvino.spec import OpenvinoSpec, dumps, loads, make_spec
from kindler.temporary import locked, private_folder

_log = logging.getLogger(__name__)

_CACHED_MODELS = 16


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
        spec = make_spec(**options)
        return replace(spec, any_rows=takes_any_rows(spec))  # once, and not in every process

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        names = self._features if len(self._features) == len(features) else [""] * len(features)
        return self._caller(self._caller.arranged(names, features))

    def trained_model(self) -> Any:
        return graph.read_ir(self.spec.xml, self.spec.weights, self.spec.name)

    def save(self, path: str) -> NoReturn:
        raise ConfigError(
            "save() writes one file, and an OpenVINO model has two.\n"
            "Hint: to_openvino('model.xml') writes both; save('name.estimator') keeps the whole estimator."
        )

    def load(self, path: str) -> NoReturn:
        raise ConfigError(
            "an OpenVINO model includes its weights.\n"
            "Hint: Estimator.from_openvino(model_path=...) reads another one."
        )

    def state(self) -> bytes:
        return b""

    @cached_property
    def _caller(self) -> RowCaller:
        return RowCaller(compiled(self.spec, self._threads), self.spec.name)


def compiled(spec: OpenvinoSpec, threads: int | None) -> Any:
    settings: dict[str, Any] = {**graph.SETTINGS, **spec.properties}
    threads = spec.threads or threads
    if spec.device == "CPU":
        # Pinned threads of several processes would all sit on the same cores.
        settings.setdefault("ENABLE_CPU_PINNING", False)
        settings.setdefault("NUM_STREAMS", 1)
        if threads is not None:
            settings.setdefault("INFERENCE_NUM_THREADS", threads)
    model = graph.read_ir(spec.xml, spec.weights, spec.name)
    if takes_any_rows(spec) if spec.any_rows is None else spec.any_rows:
        _free_rows(model)
    try:
        folder = cache_folder()
    except (ConfigError, OSError) as exc:
        _log.warning("compiling %s for this process alone: %s", spec.name, exc)
        return _compiled(model, spec, settings)
    with locked(folder / ".lock"):  # nobody reads what another process is still writing
        made = _compiled(model, spec, {"CACHE_DIR": str(folder), **settings})
        kept = sorted(folder.glob("*.blob"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in kept[_CACHED_MODELS:]:
            file.unlink(missing_ok=True)
    return made


def cache_folder() -> Path:
    folder = private_folder() / "openvino"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _compiled(model: Any, spec: OpenvinoSpec, settings: dict[str, Any]) -> Any:
    try:
        return graph.core().compile_model(model, spec.device, settings)
    except RuntimeError as exc:
        raise ConfigError(f"OpenVINO cannot compile {spec.name}: {graph.cause(exc)}") from exc


def takes_any_rows(spec: OpenvinoSpec) -> bool | None:
    """Whether a model that declares a number of rows computes each by itself, judged by made-up rows.

    None if it cannot be compiled here, where the device may be missing.
    """
    model = graph.read_ir(spec.xml, spec.weights, spec.name)
    if all(not shape or shape[0] is None for shape in map(shape_of, model.inputs)) or not _free_rows(model):
        return False
    random, rows = np.random.default_rng(0), []
    for port in model.inputs:
        lengths, dtype = (shape_of(port) or [])[1:], np.dtype(port.get_element_type().to_dtype())
        sizes = [2, *(n for n in lengths if n is not None)]
        if len(sizes) <= len(lengths):
            return False
        # 0 and 1 are valid indices of most tables.
        made = random.normal(size=sizes) if dtype.kind == "f" else random.integers(0, 2, sizes)
        rows.append(made.astype(dtype))
    try:
        return is_per_row(RowCaller(compiled(replace(spec, any_rows=True), None), spec.name).run, rows)
    except ConfigError:
        return None
    except DataError:
        return False


def _free_rows(model: Any) -> bool:
    """False if the rows of outputs would not become free, too."""
    shapes = [shape_of(port) for port in model.inputs]
    if not all(shapes) or len({shape[0] for shape in shapes if shape}) != 1:
        return False
    free = [[-1, *(-1 if n is None else n for n in (shape or [])[1:])] for shape in shapes]
    try:
        model.reshape({i: openvino.PartialShape(shape) for i, shape in enumerate(free)})
    except RuntimeError:  # a constant in it was made for the number of rows
        return False
    return all((shape_of(port) or [0])[0] is None for port in model.outputs)
