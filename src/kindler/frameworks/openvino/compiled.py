"""Compiles models once per host, in a cache in the user's private folder that keeps the newest.

A model that declares one number of rows is made to take any number, if it computes rows independently.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kindler.errors import ConfigError
from kindler.frameworks.openvino import graph
from kindler.frameworks.openvino.graph import openvino, shape_of
from kindler.frameworks.openvino.spec import OpenvinoSpec
from kindler.temporary import locked, private_folder

_log = logging.getLogger(__name__)

_KEPT = 16
_CLOSE, _NEAR_ZERO = 1e-3, 1e-5  # calls of different sizes differ in their last bits


def compiled(spec: OpenvinoSpec, threads: int | None) -> Any:
    settings = _settings(spec, threads)
    try:
        folder = cache_folder()
    except (ConfigError, OSError) as exc:
        _log.warning("compiling %s for this process alone: %s", spec.name, exc)
        return _compiled(spec, settings)
    with locked(folder / ".lock"):  # nobody reads what another process is still writing
        model = _compiled(spec, {"CACHE_DIR": str(folder), **settings})
        kept = sorted(folder.glob("*.blob"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in kept[_KEPT:]:
            file.unlink(missing_ok=True)
    return model


def cache_folder() -> Path:
    folder = private_folder() / "openvino"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _settings(spec: OpenvinoSpec, threads: int | None) -> dict[str, Any]:
    settings: dict[str, Any] = {**graph.SETTINGS, **spec.properties}
    wanted = spec.threads or threads
    if spec.device == "CPU":
        # Pinned threads of several processes would all sit on the same cores.
        settings.setdefault("ENABLE_CPU_PINNING", False)
        settings.setdefault("NUM_STREAMS", 1)
        if wanted is not None:
            settings.setdefault("INFERENCE_NUM_THREADS", wanted)
    return settings


def _compiled(spec: OpenvinoSpec, settings: Mapping[str, Any]) -> Any:
    def compile_model(model: Any) -> Any:
        return graph.core().compile_model(model, spec.device, dict(settings))

    try:
        model = graph.read_ir(spec.xml, spec.weights, spec.name)
        if _declares_rows(model):
            freed = _freed(graph.read_ir(spec.xml, spec.weights, spec.name))
            made = compile_model(freed) if freed is not None else None
            if made is not None and _is_per_row(made):
                return made
        return compile_model(model)
    except RuntimeError as exc:
        raise ConfigError(f"OpenVINO cannot compile {spec.name}: {graph.cause(exc)}") from exc


def _declares_rows(model: Any) -> bool:
    return any(shape and shape[0] is not None for shape in map(shape_of, model.inputs))


def _freed(model: Any) -> Any:
    """None if the rows of outputs would not become free, too."""
    shapes = [shape_of(port) for port in model.inputs]
    if not all(shapes) or len({shape[0] for shape in shapes if shape}) != 1:
        return None
    free = [[-1, *(-1 if n is None else n for n in (shape or [])[1:])] for shape in shapes]
    try:
        model.reshape({i: openvino.PartialShape(shape) for i, shape in enumerate(free)})
    except RuntimeError:  # a constant in it was made for the number of rows
        return None
    return model if all((shape_of(port) or [0])[0] is None for port in model.outputs) else None


def _is_per_row(model: Any) -> bool:
    """Judged by made-up rows."""
    random, rows = np.random.default_rng(0), []
    for port in model.inputs:
        shape, dtype = shape_of(port), np.dtype(port.get_element_type().to_dtype())
        if shape is None or None in shape[1:]:
            return False
        sizes = (2, *(int(n or 0) for n in shape[1:]))
        # 0 and 1 are valid indices of most tables.
        made = random.normal(size=sizes) if dtype.kind == "f" else random.integers(0, 2, sizes)
        rows.append(made.astype(dtype))
    request = model.create_infer_request()

    def outputs(*arrays: Any) -> list[Any]:
        found = request.infer(dict(enumerate(arrays)))
        return [np.array(found[i]) for i in range(len(model.outputs))]

    try:
        together = outputs(*rows)
        apart = [outputs(*(array[i : i + 1] for array in rows)) for i in range(2)]
    except RuntimeError:
        return False
    for place, both in enumerate(together):
        alone = [part[place] for part in apart]
        if len(both) != 2 or any(len(part) != 1 for part in alone):
            return False
        largest = float(np.max(np.abs(both), initial=0.0)) if both.dtype.kind in "fiu" else 0.0
        joined = np.concatenate(alone)
        if not np.allclose(joined, both, rtol=_CLOSE, atol=_NEAR_ZERO * largest, equal_nan=True):
            return False
    return True
