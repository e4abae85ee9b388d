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
    joins = warmed(predictor, alone=options["alone"])
    device = {"device": loaded.kind.device, "device_bytes": loaded.kind.device_bytes(meta)}
    # A function may keep what it is given; Kindler's own predictors do not.
    ours = type(predictor).__module__.startswith("kindler.models.")
    keeps = isinstance(predictor, CallablePredictor) or not ours

    def handle(fields: Fields, inputs: Arrays) -> tuple[Fields, Arrays]:
        if keeps:
            inputs = {name: array.copy() for name, array in inputs.items()}
        return {}, predictor.call(inputs, fields["method"])

    return {**description(predictor, joins), **device}, handle


def warmed(servable: Predictor, *, alone: bool) -> dict[str, bool | None]:
    """Call a model with made-up rows, so that what happens at a first call does not happen at a client's.

    Its signature gets the outputs of the first method, if it did not know them.

    Returns:
        For each method, whether requests may share a call; None if that is not known.
    """
    joins = False if alone else servable.joins
    given = example(servable.signature, rows=3)
    found: dict[str, bool | None] = {}
    for method in servable.methods:
        found[method] = joins
        if given is None or (joins is not None and found.keys() != {servable.methods[0]}):
            continue
        try:
            if joins is None:
                found[method] = is_per_row(partial(_called, servable, method), given)
            if joins is not None or not (servable.signature.outputs or method != servable.methods[0]):
                outputs = servable.call({name: array[:2] for name, array in given.items()}, method)
                if not servable.signature.outputs:
                    servable.signature = replace(servable.signature, outputs=_specs(outputs))
        except Exception as exc:  # noqa: BLE001 - made-up values may be nothing that it can take
            _log.info("a call with made-up values failed: %s", exc)
    return found


def _specs(outputs: Arrays) -> tuple[TensorSpec, ...]:
    """What outputs for two rows say of any number of rows."""
    return tuple(
        TensorSpec(
            name, str(array.dtype), (None if array.shape[:1] == (2,) else len(array), *array.shape[1:])
        )
        for name, array in outputs.items()
        if array.ndim
    )


def _called(servable: Predictor, method: str, rows: Arrays) -> Arrays:
    return servable.call(rows, method)


def description(predictor: Predictor, joins: Mapping[str, bool | None]) -> Fields:
    known = predictor.signatures
    return {
        "signature": asdict(predictor.signature),
        "own": [name for name, signature in known.items() if signature is predictor.signature],
        "signatures": {
            name: asdict(signature)
            for name, signature in known.items()
            if signature is not predictor.signature
        },
        "methods": predictor.methods,
        "joins": joins,
    }


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """What a process told of the model that it has loaded.

    Attributes:
        predictor: Its signatures and methods; it cannot be called here.
        joins: For each method, whether requests may share a call; None if that is not known.
        device: Where it computes, "cpu" or "cuda"; None if its own code decides.
        device_bytes: What the process has of its GPU's memory, as far as is known.
    """

    predictor: Predictor
    joins: dict[str, bool | None]
    device: str | None = None
    device_bytes: int = 0


class _Elsewhere(Predictor):
    """A model in another process."""

    def __init__(self, fields: Fields) -> None:
        self.signature = signature_from(fields["signature"])
        self.methods = tuple(map(str, fields["methods"]))
        others = {str(name): signature_from(one) for name, one in fields["signatures"].items()}
        own = {str(name): self.signature for name in fields["own"]}
        self._signatures = {**own, **others}

    @property
    def signatures(self) -> dict[str, Signature]:
        return self._signatures

    def call(self, inputs: Arrays, method: str) -> Arrays:
        raise NotImplementedError("it is called in its own process")


def described(fields: Any) -> DescribedModel:
    """What the server makes of a description.

    Raises:
        ValueError: It cannot be.
    """
    try:
        joins = {str(m): None if j is None else bool(j) for m, j in fields["joins"].items()}
        model = _Elsewhere(fields)
        for signature in model.signatures.values():
            _check(signature)
        if not model.methods or not model.signature.inputs:
            raise ValueError("a model without methods or inputs")
        device = fields.get("device")
        if device not in (None, "cpu", "cuda"):
            raise ValueError("no such device")
        return DescribedModel(model, joins, device, max(0, int(fields.get("device_bytes", 0))))
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"no description of a model: {exc!r}") from exc


def _check(signature: Signature) -> None:
    for spec in (*signature.inputs, *signature.outputs):
        received.shape([size for size in spec.shape or () if size is not None])
        if type(spec.name) is not str or not isinstance(spec.dtype, str | None):
            raise ValueError("no description of an array")
    if not all(type(name) is str for name in signature.columns or ()):
        raise ValueError("no names of columns")
