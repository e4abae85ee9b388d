"""JSON views of stored objects, for the web page and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import kindler
from kindler.models.signature import Signature, TensorSpec
from kindler.serve.loaded_models import Resident
from kindler.serve.protocols.v2 import described
from kindler.store import Version

_EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")


def show_version(version: Version, tags: Mapping[str, int] | None = None) -> dict[str, Any]:
    view: dict[str, Any] = {
        "name": version.name,
        "bucket": version.bucket,
        "version": version.number,
        "kind": version.kind,
        "created": version.created.isoformat(),
        "size": version.size,
        "digest": version.digest,
        "files": len(version.files),
        "attributes": dict(version.attributes),
    }
    if tags is not None:
        view["aliases"] = sorted(tag for tag, number in tags.items() if number == version.number)
    return view


def show_model(
    versions: Sequence[Version], tags: Mapping[str, int], chosen: Version, resident: Resident | None
) -> dict[str, Any]:
    """A model with all its versions; `chosen` is the requested one."""
    signature = show_signature(resident.servable.signature) if resident is not None else _stored(chosen.meta)
    return {
        **show_version(chosen, tags),
        "newest": versions[-1].number,
        "tags": dict(tags),
        "versions": [show_version(version, tags) for version in reversed(versions)],
        "signature": signature,
        "history": _history(chosen.meta.get("history") or chosen.attributes.get("history")),
        "loaded": resident is not None,
    }


def server_metadata() -> dict[str, Any]:
    """The server, as the Open Inference Protocol has it."""
    return {"name": "kindler", "version": kindler.__version__, "extensions": list(_EXTENSIONS)}


def metadata_of(resident: Resident, versions: Sequence[int]) -> dict[str, Any]:
    """A loaded model, as the Open Inference Protocol has it.

    Args:
        resident: The model.
        versions: The versions that can be asked for.
    """
    signature = resident.servable.signature
    inputs = signature.inputs
    if resident.version.kind == "estimator" and signature.columns:
        # It was trained on columns, and stacks them itself; one matrix of all of them is taken too.
        inputs = tuple(TensorSpec(name, inputs[0].dtype, (None,)) for name in signature.columns)
    return {
        "name": resident.version.name,
        "versions": [str(number) for number in versions],
        "platform": f"kindler_{resident.version.kind}",
        "inputs": [described(spec) for spec in inputs],
        "outputs": [described(spec) for spec in signature.outputs],
    }


def show_signature(signature: Signature) -> dict[str, Any]:
    """The inputs and outputs of a model."""
    return {
        "inputs": [_spec(spec) for spec in signature.inputs],
        "outputs": [_spec(spec) for spec in signature.outputs],
        "columns": list(signature.columns) if signature.columns is not None else None,
    }


def show_resident(resident: Resident) -> dict[str, Any]:
    """A loaded model."""
    return {
        "name": resident.version.name,
        "bucket": resident.version.bucket,
        "version": resident.version.number,
        "kind": resident.version.kind,
        "size": resident.size,
        "device": resident.device,
        "device_bytes": resident.device_bytes,
        "rows_waiting": resident.batcher.rows_waiting,
        "batches_join": resident.batcher.joins(resident.servable.methods[0]),
        "methods": list(resident.servable.methods),
    }


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "dtype": spec.dtype,
        "shape": None if spec.shape is None else [-1 if n is None else n for n in spec.shape],
    }


def _history(recorded: Any) -> list[Any]:
    """Epochs as a list, from a list or from columns as Keras records them."""
    if not isinstance(recorded, Mapping):
        return list(recorded) if isinstance(recorded, Sequence) and not isinstance(recorded, str) else []
    columns = {name: values for name, values in recorded.items() if isinstance(values, list)}
    epochs = max(map(len, columns.values()), default=0)
    return [
        {"epoch": i + 1, **{name: values[i] for name, values in columns.items() if i < len(values)}}
        for i in range(epochs)
    ]


def _stored(meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """The signature that the store recorded for a model that is not loaded."""
    recorded = meta.get("model_meta") or meta
    if not recorded.get("inputs"):
        return None

    def side(entries: Any) -> list[dict[str, Any]]:
        return [
            {**entry, "shape": [-1 if n is None else n for n in entry["shape"]]} for entry in entries or ()
        ]

    return {"inputs": side(recorded["inputs"]), "outputs": side(recorded.get("outputs")), "columns": None}
