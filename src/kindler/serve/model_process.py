"""A model in a process of its own: what the process is told to load, and what it tells of the model.

`load` runs in the process (see `sandbox/child.py`), `described` in the server, which believes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kindler.data import received
from kindler.models.loaded import load_files
from kindler.models.predictor import CallablePredictor, Predictor, is_per_row
from kindler.models.signature import Arrays, Signature, TensorSpec, example, signature_from
from kindler.sandbox.child import Fields, Handler

_log = logging.getLogger("kindler.serve")


def load(options: Fields) -> tuple[Fields, Handler]:
    """The target of a model's process: loads the model, calls it once, and handles its calls."""
    folder, meta = Path(options["folder"]), options["meta"]
    loaded = load_files(
        options["kind"], folder, meta, trusted=options["trusted"], device=options.get("device")
    )
    predictor = loaded.predictor
    batchable = warmed(predictor, options["batching"])
    device = {"device": loaded.kind.device, "device_bytes": loaded.kind.device_bytes(meta)}
    # A function may keep what it is given; Kindler's own predictors do not.
    ours = type(predictor).__module__.startswith("kindler.models.")
    keeps = isinstance(predictor, CallablePredictor) or not ours

    def handle(fields: Fields, inputs: Arrays) -> tuple[Fields, Arrays]:
        if keeps:
            inputs = {name: array.copy() for name, array in inputs.items()}
        return {}, predictor.call(inputs, fields["method"])

    return {**description(predictor, batchable), **device}, handle


def warmed(predictor: Predictor, batching: bool | None = None) -> dict[str, bool | None]:
    """Call a model with made-up rows, so that what happens at a first call does not happen at a client's.

    Its signature gets the outputs of the first method, if it did not know them. Returns for each method
    whether requests may share a call; None if that is not known. `batching` is what somebody says of all.
    """
    declared = predictor.joins if batching is None else batching
    rows = example(predictor.signature, rows=3)
    batchable: dict[str, bool | None] = dict.fromkeys(predictor.methods, declared)
    if rows is None:
        return batchable
    for method in batchable:
        is_first = method == predictor.methods[0]
        try:
            if declared is None:
                batchable[method] = is_per_row(partial(_call, predictor, method), rows)
            if is_first and (declared is not None or not predictor.signature.outputs):
                outputs = predictor.call({name: array[:2] for name, array in rows.items()}, method)
                if not predictor.signature.outputs:
                    predictor.signature = replace(predictor.signature, outputs=_specs(outputs))
        except Exception as exc:  # noqa: BLE001 - made-up values may be nothing that it can take
            _log.info("a call with example values failed: %s", exc)
    return batchable


def _call(predictor: Predictor, method: str, rows: Arrays) -> Arrays:
    return predictor.call(rows, method)


def _specs(outputs: Arrays) -> tuple[TensorSpec, ...]:
    """What outputs for two rows say of any number of rows."""
    return tuple(
        TensorSpec(
            name, str(array.dtype), (None if array.shape[:1] == (2,) else len(array), *array.shape[1:])
        )
        for name, array in outputs.items()
        if array.ndim
    )


def description(predictor: Predictor, batchable: Mapping[str, bool | None]) -> Fields:
    return {
        "signature": asdict(predictor.signature),
        "signatures": {  # None for its own
            name: None if signature is predictor.signature else asdict(signature)
            for name, signature in predictor.signatures.items()
        },
        "methods": predictor.methods,
        "batchable": batchable,
    }


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model that was loaded.

    Attributes:
        predictor: Its signatures and methods; one of another process cannot be called here.
        batchable: For each method, whether requests may share a call; None if that is not known.
        device: Where it computes, "cpu" or "cuda"; None if its own code decides.
        device_bytes: What the process has of its GPU's memory, as far as is known.
    """

    predictor: Predictor
    batchable: Mapping[str, bool | None]
    device: str | None = None
    device_bytes: int = 0


class _RemotePredictor(Predictor):
    def __init__(self, fields: Fields) -> None:
        self.signature = signature_from(fields["signature"])
        self.methods = tuple(map(str, fields["methods"]))
        self._signatures = {
            str(name): self.signature if one is None else signature_from(one)
            for name, one in fields["signatures"].items()
        }

    @property
    def signatures(self) -> Mapping[str, Signature]:
        return self._signatures


def described(fields: Any) -> DescribedModel:
    """What the server makes of a description.

    Raises:
        ValueError: It does not describe a model.
    """
    try:
        batchable = {str(m): None if b is None else bool(b) for m, b in fields["batchable"].items()}
        model = _RemotePredictor(fields)
        for signature in (model.signature, *model.signatures.values()):
            _check(signature)
        if not model.methods or not model.signature.inputs:
            raise ValueError("a model without methods or inputs")
        device = fields.get("device")
        if device not in (None, "cpu", "cuda"):
            raise ValueError("no such device")
        return DescribedModel(model, batchable, device, max(0, int(fields.get("device_bytes", 0))))
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"no description of a model: {exc!r}") from exc


def _check(signature: Signature) -> None:
    for spec in (*signature.inputs, *signature.outputs):
        received.shape([size for size in spec.shape or () if size is not None])
        if type(spec.name) is not str or not isinstance(spec.dtype, str | None):
            raise ValueError("no description of an array")
    if not all(type(name) is str for name in signature.columns or ()):
        raise ValueError("no names of columns")
