"""Models as JSON, for the web page, the Open Inference Protocol, TensorFlow Serving and Triton.

The gRPC service writes the same values as messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import kindler
from kindler.models.signature import Signature, TensorSpec
from kindler.serve.auth import bare_name
from kindler.serve.http_errors import Problem
from kindler.serve.model_registry import LoadedModel, ModelRegistry, Name, shown_name
from kindler.serve.protocols.v2 import described
from kindler.serve.stats import VersionStats
from kindler.shelves.lineage import fits
from kindler.store import Version

_EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
_OF_FIT = (
    *("began", "start", "parent", "rows", "fingerprint", "framework", "engine", "workers", "seed"),
    "metrics",
)
_PATHS = 10
_TF_TYPES = {"float16": "HALF", "float32": "FLOAT", "float64": "DOUBLE", "object": "STRING"}


def version_view(version: Version, tags: Mapping[str, int] | None = None) -> dict[str, Any]:
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
        view["tags"] = sorted(tag for tag, number in tags.items() if number == version.number)
    return view


def lineage_view(version: Version) -> list[dict[str, Any]]:
    """What made a version, in short: without the source of functions, their arguments and people."""
    return [
        {
            **{name: fit.get(name) for name in _OF_FIT},
            "data": _data_view(fit.get("data")),
            "validation": _data_view(fit.get("validation")),
        }
        for fit in fits(version)
    ]


def _data_view(data: Any) -> dict[str, Any] | None:
    if not isinstance(data, Mapping):
        return None
    files = data.get("files")
    paths = [one.get("path") for one in files if isinstance(one, Mapping)] if isinstance(files, list) else []
    return {"kind": data.get("kind"), "file_count": data.get("file_count"), "paths": paths[:_PATHS]}


def model_view(
    versions: Sequence[Version], tags: Mapping[str, int], chosen: Version, loaded: LoadedModel | None
) -> dict[str, Any]:
    """A model with all its versions; `chosen` is the requested one."""
    signature = _recorded(chosen.meta) if loaded is None else signature_view(loaded.predictor.signature)
    return {
        **version_view(chosen, tags),
        "newest": versions[-1].number,
        "tags": dict(tags),
        "versions": [version_view(version, tags) for version in reversed(versions)],
        "signature": signature,
        "history": _history(chosen.meta.get("history") or chosen.attributes.get("history")),
        "loaded": loaded is not None,
        "statistics": bool(chosen.meta.get("statistics")),  # whether drift can be told
    }


def signature_view(signature: Signature) -> dict[str, Any]:
    def side(specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
        return [{"name": s.name, "dtype": s.dtype, "shape": _shape(s.shape)} for s in specs]

    columns = None if signature.columns is None else list(signature.columns)
    return {"inputs": side(signature.inputs), "outputs": side(signature.outputs), "columns": columns}


def loaded_view(model: LoadedModel) -> dict[str, Any]:
    return {
        "name": model.version.name,
        "bucket": model.version.bucket,
        "version": model.version.number,
        "kind": model.version.kind,
        "size": model.size,
        "device": model.device,
        "device_bytes": model.device_bytes,
        "rows_waiting": model.batcher.rows_waiting,
        "batches_join": model.batcher.is_batchable(model.predictor.methods[0]),
        "methods": list(model.predictor.methods),
        "batches": asdict(model.plan),
    }


def server_metadata() -> dict[str, Any]:
    """The server, as the Open Inference Protocol has it."""
    return {"name": "kindler", "version": kindler.__version__, "extensions": list(_EXTENSIONS)}


async def model_metadata(models: ModelRegistry, name: Name) -> dict[str, Any]:
    """A model, loaded if it is not, as the Open Inference Protocol has it."""
    model = await models.find(name)
    signature = model.predictor.signature
    inputs = signature.inputs
    if model.version.kind == "estimator" and signature.columns:
        # It was trained on columns, and stacks them itself; one matrix of all of them is taken too.
        inputs = tuple(TensorSpec(name, inputs[0].dtype, (None,)) for name in signature.columns)
    return {
        "name": model.version.name,
        "versions": [str(number) for number in await models.numbers(model.version)],
        "platform": f"kindler_{model.version.kind}",
        "inputs": [described(spec) for spec in inputs],
        "outputs": [described(spec) for spec in signature.outputs],
    }


def signature_def(model: LoadedModel) -> dict[str, Any]:
    """A loaded model, as TensorFlow Serving has it."""

    def side(specs: Iterable[TensorSpec]) -> dict[str, Any]:
        tensors = {}
        for spec in specs:
            dims = [{"size": str(n), "name": ""} for n in _shape(spec.shape) or ()]
            dtype = spec.dtype or "float64"
            tensors[spec.name] = {
                "dtype": f"DT_{_TF_TYPES.get(dtype, dtype.upper())}",
                "tensor_shape": {"dim": dims, "unknown_rank": spec.shape is None},
                "name": spec.name,
            }
        return tensors

    functions = {
        name: {
            "inputs": side(signature.inputs),
            "outputs": side(signature.outputs),
            "method_name": "tensorflow/serving/predict",
            "defaults": {},
        }
        for name, signature in model.predictor.signatures.items()
    }
    version = str(model.version.number)
    return {
        "model_spec": {"name": model.version.name, "signature_name": "", "version": version},
        "metadata": {"signature_def": {"signature_def": functions}},
    }


async def triton_config(models: ModelRegistry, name: Name) -> dict[str, Any]:
    """Triton's configuration of a model, loaded if it is not; dims are without the rows if these are free."""
    model, settings = await models.find(name), models.settings
    signature = model.predictor.signature
    specs = (*signature.inputs, *signature.outputs)
    rows_free = all(spec.shape is None or (spec.shape and spec.shape[0] is None) for spec in specs)

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        view = described(spec)
        kind = "STRING" if view["datatype"] == "BYTES" else view["datatype"]
        dims = view["shape"][1:] if rows_free else view["shape"]
        return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": dims}

    config: dict[str, Any] = {
        "name": model.version.name,
        "platform": f"kindler_{model.version.kind}",
        "backend": model.version.kind,
        "version_policy": {"specific": {"versions": [model.version.number]}},
        "max_batch_size": settings.rows if rows_free else 0,
        "input": [tensor(spec) for spec in signature.inputs],
        "output": [tensor(spec) for spec in signature.outputs],
    }
    if model.batcher.is_batchable(model.predictor.methods[0]):
        config["dynamic_batching"] = {
            "preferred_batch_size": [settings.batch_rows],
            "max_queue_delay_microseconds": 0,
        }
    return config


async def triton_statistics(
    models: ModelRegistry, bucket: str, sees: Callable[[str, str], bool], name: str, version: str | None
) -> dict[str, Any]:
    """Triton's statistics of a model's versions, or without a name of all models that are seen."""
    chosen = await models.version((bucket, name, version)) if name else None
    bare = version is None and bare_name(name) == name
    sizes = {(shown_name(m.version), m.version.number): m.size for m in models.loaded()}
    counted = []
    for (shown, number), stats in sorted(models.stats.versions.items()):
        there, _, own = shown.rpartition(":")
        if chosen is None:
            wanted = sees("models", own)
        else:
            wanted = own == chosen.name and (bare or number == chosen.number)
        if wanted and (there or "default") == bucket:
            counted.append(_statistics(own, number, stats, sizes.get((shown, number))))
    return {"model_stats": counted}


def triton_index(
    models: ModelRegistry, bucket: str, sees: Callable[[str, str], bool], *, ready: bool
) -> list[dict[str, str]]:
    """The models of a bucket with their newest versions; only those that are served if `ready`."""
    entries = []
    for version in models.storage[bucket].models.newest():
        gone = models.is_unloaded(bucket, version.name)
        if sees("models", version.name) and not (ready and gone):
            state, reason = ("UNAVAILABLE", "unloaded") if gone else ("READY", "")
            number = str(version.number)
            entries.append({"name": version.name, "version": number, "state": state, "reason": reason})
    return entries


def check_load_parameters(names: Iterable[str]) -> None:
    """Reject a configuration or files with a request to load a model: one of the store has its own."""
    for name in names:
        raise Problem(
            400, f"loading takes no parameters; received {name[:100]!r}. Models come from the store."
        )


def _shape(sizes: Iterable[int | None] | None) -> list[int] | None:
    return None if sizes is None else [-1 if n is None else n for n in sizes]


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


def _recorded(meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """The signature that the store recorded for a model that is not loaded."""
    recorded = meta.get("model_meta") or meta
    if not recorded.get("inputs"):
        return None

    sides = {
        side: [{**entry, "shape": _shape(entry["shape"])} for entry in recorded.get(side) or ()]
        for side in ("inputs", "outputs")
    }
    return {**sides, "columns": None}


def _statistics(name: str, number: int, stats: VersionStats, size: int | None) -> dict[str, Any]:
    def duration(count: float, seconds: float) -> dict[str, int]:
        return {"count": int(count), "ns": int(seconds * 1_000_000_000)}

    none = duration(0, 0)
    apart = {"compute_input": none, "compute_output": none}
    return {
        "name": name,
        "version": str(number),
        "last_inference": int(stats.last * 1000),
        "inference_count": stats.rows,
        "execution_count": stats.batches,
        "inference_stats": {
            "success": duration(stats.requests - stats.failures, stats.seconds - stats.failed_seconds),
            "fail": duration(stats.failures, stats.failed_seconds),
            "queue": duration(stats.batches, stats.queue_seconds),
            "compute_infer": duration(stats.batches, stats.call_seconds),
            **apart,
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [
            {"batch_size": rows, "compute_infer": duration(count, seconds), **apart}
            for rows, (count, seconds) in sorted(stats.by_rows.items())
        ],
        "memory_usage": [] if size is None else [{"type": "CPU", "id": 0, "byte_size": size}],
    }
