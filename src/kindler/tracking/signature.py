"""What a model takes and gives, in MLflow's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mlflow.models import ModelSignature
from mlflow.types.schema import AnyType, ColSpec, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import TensorSpec as MlflowTensor

from kindler.models.predictor import Predictor
from kindler.models.signature import Array, Signature, TensorSpec, example


def signature_of(predictor: Predictor) -> ModelSignature | None:
    """The signature; None for a model that does not say what it takes before it is called.

    A model with one input takes arrays, or a table of its width; one with several takes them by name. A model
    that was trained on columns of a table takes those.
    """
    inputs = _inputs(predictor.signature)
    if inputs is None:
        return None
    outputs = _outputs(_tried(predictor) or {})
    return ModelSignature(inputs=inputs, outputs=outputs, params=_params(predictor.methods))


def _inputs(signature: Signature) -> Schema | None:
    specs = signature.inputs
    if signature.columns is not None:
        # Not float: MLflow refuses doubles, as every table has them, where it is told that.
        kind = AnyType() if specs[0].dtype in (None, "object") else "double"
        return Schema([ColSpec(type=kind, name=name) for name in signature.columns])
    if not all(spec.dtype and spec.shape for spec in specs):
        return None
    return Schema([_tensor(spec, spec.name if len(specs) > 1 else None) for spec in specs])


def _tensor(spec: TensorSpec, name: str | None) -> MlflowTensor:
    shape = tuple(-1 if size is None else size for size in spec.shape or ())
    return MlflowTensor(np.dtype(spec.dtype or "object"), (-1, *shape[1:]), name)


def _outputs(arrays: Mapping[str, Array]) -> Schema | None:
    if not arrays:
        return None
    return Schema(
        [
            MlflowTensor(np.dtype(array.dtype), (-1, *array.shape[1:]), name if len(arrays) > 1 else None)
            for name, array in arrays.items()
        ]
    )


def _tried(predictor: Predictor) -> dict[str, Array] | None:
    """What comes of one row, where one can be made up."""
    row = example(predictor.signature)
    try:
        return None if row is None else predictor.call(row, "predict")
    except Exception:  # noqa: BLE001  the row may be nothing to this model; then its outputs stay unsaid
        return None


def _params(methods: Sequence[str]) -> Any:
    if len(methods) < 2:
        return None
    return ParamSchema([ParamSpec(name="method", dtype="string", default=methods[0])])
