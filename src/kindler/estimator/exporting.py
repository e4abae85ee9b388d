"""Trained models in formats of other runtimes: ONNX and OpenVINO files, and scoring with OpenVINO.

A model is exported from a copy, and the converted model is compared with it before it is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from kindler.data.arrays import named
from kindler.data.batches import inputs
from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Array, ColumnPlan
from kindler.errors import ConfigError
from kindler.estimator.checks import ability_complaints, refuse
from kindler.estimator.inputs.contract import PROBE_ROWS, few_rows
from kindler.estimator.model import FrameworkModel
from kindler.frameworks.registry import FRAMEWORKS
from kindler.frameworks.state_format import ScoringModel
from kindler.inference.predictor import Recipe
from kindler.temporary import Folder, beside

_OPENVINO = "openvino"
_CLOSE = 1e-2  # a wrong graph is far off; rounding is not
_LABELS = re.compile(r"label|y\d*|sample_weight")


class Example:
    """A few rows of each input of a model, and the columns they are made of."""

    def __init__(self, columns: ColumnPlan, arrays: Sequence[Array]) -> None:
        self.names = tuple(column.name for column in columns.features)
        self.features = inputs(columns, list(arrays))

    def key(self, model: FrameworkModel, weights: ScoringModel) -> str:
        shapes = [(array.dtype.name, array.shape[1:]) for array in self.features]
        return repr((model.framework, self.names, shapes, weights.content))


def example_of(given: Any, known: ColumnOptions, layout: Mapping[str, Any]) -> Example:
    """The user's example, or else zeros in the form of the columns of the last fit."""
    if given is not None:
        options = replace(known, label_cols=None, need_labels=False, shapes=None, dtypes=None, allow_nan=True)
        found = named(given).called(options.features, None)
        if found.features is not None or not set(options.features or ("",)) <= set(found.columns):
            options = replace(options, feature_cols=found.features or list(found.columns))
        columns = options.plan(found.types)
        return Example(columns, few_rows(found.columns, columns))
    if not layout:
        raise ConfigError(
            "the shapes of the model's inputs are not known before fit().\n"
            "Hint: pass example=..., a few rows as predict() takes them."
        )
    features = known.features or [name for name in layout if not _LABELS.fullmatch(name)]
    columns = replace(known, feature_cols=features, label_cols=None, need_labels=False).plan(list(layout))
    arrays = [np.zeros((PROBE_ROWS, *layout[name][1]), layout[name][0]) for name in features]
    return Example(columns, arrays)


def write_onnx(
    model: FrameworkModel, weights: ScoringModel, path: str | PathLike[str], example: Example
) -> None:
    scorer = _copy_of(model, weights, example)
    scorer.predict(example.features)  # a model that is built by its first rows
    with beside(path) as unfinished:
        scorer.export("onnx", str(unfinished), example.features)


def write_openvino(
    model: FrameworkModel,
    weights: ScoringModel,
    path: str | PathLike[str],
    make_example: Callable[[], Example],
) -> None:
    """Write the .xml file and the .bin file next to it; a model already in this format is written as is."""
    target = Path(path).absolute()
    if target.suffix != ".xml":
        raise ConfigError(
            f"to_openvino({os.fspath(path)!r}): the name must end in .xml; the weights go to a .bin file of"
            " the same name."
        )
    spec = model.spec if model.row.form == "openvino" else _converted(model, weights, make_example())[1]
    for file, data in ((target.with_suffix(".bin"), spec.weights), (target, spec.xml)):
        with beside(file) as unfinished:
            unfinished.write_bytes(data)


def in_openvino(model: FrameworkModel, weights: ScoringModel, example: Example) -> FrameworkModel:
    names, spec = _converted(model, weights, example)
    return FrameworkModel(framework=_OPENVINO, spec=replace(spec, name="the model", output_names=names))


def _converted(
    model: FrameworkModel, weights: ScoringModel, example: Example
) -> tuple[tuple[str, ...] | None, Any]:
    refuse(*ability_complaints(model.row, "export"))
    runtime, scorer = FRAMEWORKS.load(_OPENVINO), _copy_of(model, weights, example)
    scorer.predict(example.features)  # a model that is built by its first rows
    names = scorer.output_names
    with Folder("kindler-export-") as folder:
        path = str(folder / "model.xml")
        scorer.export("openvino", path, example.features)
        spec = runtime.make_spec(model_path=path)
    converted = runtime(spec, feature_names=example.names)
    for rows in (example.features, _made_up(example.features)):
        try:
            expected = scorer.predict(rows)
        except Exception:  # noqa: BLE001 - it does not take what was made up
            continue
        _require_same(converted.predict(rows), expected)
    return names, spec


def _copy_of(model: FrameworkModel, weights: ScoringModel, example: Example) -> Any:
    recipe = Recipe(
        framework=model.framework,
        spec=weights.spec,
        state=weights.state,
        feature_names=example.names,
        device="cpu",
        seed=0,
    )
    return recipe.load()


def _made_up(features: Sequence[Array]) -> tuple[Array, ...]:
    """Values other than the example's, which may be zeros: code that branches on them takes another way."""
    random = np.random.default_rng(0)
    return tuple(
        np.asarray(random.normal(size=array.shape), array.dtype) if array.dtype.kind == "f" else array
        for array in features
    )


def _require_same(found: Sequence[Array], expected: Sequence[Array]) -> None:
    shapes = [[list(array.shape) for array in arrays] for arrays in (found, expected)]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"the converted model gives outputs of shape {shapes[0]} where the model gives {shapes[1]}."
        )
    for place, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
        scale = float(np.max(np.abs(wanted), initial=0.0)) if wanted.dtype.kind in "fiu" else 0.0
        if not np.allclose(mine, wanted, rtol=_CLOSE, atol=_CLOSE * scale, equal_nan=True):
            raise ConfigError(
                f"the converted model computes different results than the model (output {place}).\n"
                "Hint: code that depends on values of its inputs, or draws random numbers, is lost when a"
                " model is traced; use predict() without runtime."
            )
