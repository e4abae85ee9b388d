"""A model in a process of its own: what the process is told to load, and what it tells of the model.

`load` runs in the process (see `sandbox/child.py`), `described` in the server, which believes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from kindler.data import received
from kindler.errors import ConfigError
from kindler.models.loaded import load_files
from kindler.models.predictor import (
    TOLERANCES,
    BatchPlan,
    CallablePredictor,
    PendingCall,
    Predictor,
    is_per_row,
)
from kindler.models.signature import Arrays, Signature, TensorSpec, signature_from
from kindler.sandbox.child import MOST_CALLS, Fields, Handler

Handled: TypeAlias = tuple[Fields, Arrays]

_MOST_SIZES = 64
_DTYPES = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_DTYPES += ("float16", "float32", "float64", "object")
_log = logging.getLogger("kindler.serve")


def load(options: Fields) -> tuple[Fields, Handler]:
    """The target of a model's process: loads the model, calls it once, and handles its calls."""
    folder, meta = Path(options["folder"]), options["meta"]
    loaded = load_files(
        options["kind"], folder, meta, trusted=options["trusted"], device=options.get("device")
    )
    predictor = loaded.predictor
    if loaded.kind.device == "cuda":
        predictor.tolerance = max(predictor.tolerance, TOLERANCES["tf32"])
    batchable, plan = readied(predictor, options["prepared"], most_rows=options["batch_rows"])
    device = {"device": loaded.kind.device, "device_bytes": loaded.kind.device_bytes(meta)}
    return {**description(predictor, batchable, plan), **device}, _Handler(predictor)


class _Handler:
    """Handles calls of a predictor; what it can begin is not waited for."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self.attach = predictor.attach
        # A function may keep what it is given; Kindler's own predictors do not.
        ours = type(predictor).__module__.startswith("kindler.models.")
        self._keeps = isinstance(predictor, CallablePredictor) or not ours

    def __call__(self, fields: Fields, inputs: Arrays) -> Handled | _Pending:
        if "step" in fields:
            return self._predictor.step(fields["step"]), {}
        if self._keeps:
            inputs = {name: array.copy() for name, array in inputs.items()}
        pending = self._predictor.begin(inputs, fields["method"])
        return ({}, self._predictor.call(inputs, fields["method"])) if pending is None else _Pending(pending)


class _Pending:
    def __init__(self, call: PendingCall) -> None:
        self.is_ready, self._call = call.is_ready, call

    def wait(self) -> Handled:
        return {}, self._call.wait()


def readied(
    predictor: Predictor, stored: Mapping[str, Any], *, most_rows: int
) -> tuple[dict[str, bool | None], BatchPlan]:
    """Make a model ready as it was stored: with declared inputs, in a precision, for batches.

    Raises:
        ConfigError: What was stored with it does not fit the model.
    """
    if stored.get("inputs") is not None:
        predictor.signature = _declared(predictor.signature, stored["inputs"])
    if stored.get("precision") is not None:
        predictor.set_precision(stored["precision"])
    batching = stored.get("batching")
    batchable = warmed(predictor, batching)
    first = predictor.methods[0]
    rows = predictor.example(most_rows)
    try:
        plan = predictor.prepare(rows, joins=bool(batchable[first]))
    except (MemoryError, RuntimeError, ValueError, TypeError) as exc:
        # Made-up values may be nothing that it can take.
        _log.warning("calls with example values failed: %s", exc)
        plan = predictor.prepare(None, joins=False)
    if batching is None and plan.within is not None and plan.within > plan.tolerance:
        batchable[first] = False
    return batchable, plan


def _declared(signature: Signature, inputs: Any) -> Signature:
    """A signature with what whoever stored the model says of its inputs."""
    what = "attributes inputs="
    known = {spec.name: spec for spec in signature.inputs}
    if not isinstance(inputs, Mapping) or not set(inputs) <= set(known):
        raise ConfigError(
            f"{what}{inputs!r}: must be a dict whose keys are inputs of the model: {', '.join(known)}.\n"
            'Hint: for example {"image": {"dtype": "uint8", "shape": [3, 224, 224]}}.'
        )
    for name, told in inputs.items():
        dtype: Any
        shape: Any
        dtype, shape = (told.get("dtype"), told.get("shape")) if isinstance(told, Mapping) else (0, 0)
        sizes_fit = shape is None or (
            isinstance(shape, list | tuple) and all(n is None or (type(n) is int and n > 0) for n in shape)
        )
        if set(told if isinstance(told, Mapping) else "?") - {"dtype", "shape"} or not sizes_fit:
            raise ConfigError(
                f"{what}{{{name!r}: {told!r}}}: must be a dict with the dtype, and the shape of a row."
            )
        if dtype is not None and dtype not in _DTYPES:
            raise ConfigError(f"{what}{{{name!r}: {told!r}}}: the dtype must be one of {', '.join(_DTYPES)}.")
        spec = known[name]
        known[name] = replace(
            spec,
            dtype=dtype or spec.dtype,
            shape=spec.shape if shape is None else (None, *shape),
            narrow=spec.narrow and dtype is None,
        )
    return replace(signature, inputs=tuple(known.values()))


def warmed(predictor: Predictor, batching: bool | None = None) -> dict[str, bool | None]:
    """Call a model with made-up rows, so that what happens at a first call does not happen at a client's.

    Its signature gets the outputs of the first method, if it did not know them. Returns for each method
    whether requests may share a call; None if that is not known. `batching` is what somebody says of all.
    """
    declared = predictor.joins if batching is None else batching
    rows = predictor.example(3)
    batchable: dict[str, bool | None] = dict.fromkeys(predictor.methods, declared)
    if rows is None:
        return batchable
    for method in batchable:
        is_first = method == predictor.methods[0]
        try:
            if declared is None:
                batchable[method] = _is_per_row(predictor, method, rows)
            if is_first and (declared is not None or not predictor.signature.outputs):
                outputs = predictor.call({name: array[:2] for name, array in rows.items()}, method)
                if not predictor.signature.outputs:
                    predictor.signature = replace(predictor.signature, outputs=_specs(outputs))
        except Exception as exc:  # noqa: BLE001 - made-up values may be nothing that it can take
            _log.info("a call with example values failed: %s", exc)
    return batchable


def _is_per_row(predictor: Predictor, method: str, rows: Arrays) -> bool | None:
    """By the first trial that the model takes."""
    *others, last = predictor.trials()
    for within, tolerance in others:
        try:
            with within:
                return is_per_row(partial(_call, predictor, method), rows, tolerance)
        except Exception as exc:  # noqa: BLE001 - it may not be able to compute so
            _log.info("a trial failed: %s", exc)
    within, tolerance = last
    with within:
        return is_per_row(partial(_call, predictor, method), rows, tolerance)


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


def description(
    predictor: Predictor, batchable: Mapping[str, bool | None], plan: BatchPlan | None = None
) -> Fields:
    return {
        "plan": asdict(plan or BatchPlan()),
        "calls": predictor.calls,
        "signature": asdict(predictor.signature),
        "signatures": {  # None for its own
            name: None if signature is predictor.signature else asdict(signature)
            for name, signature in predictor.signatures.items()
        },
        "methods": predictor.methods,
        "batchable": batchable,
        "text": predictor.text,
    }


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model that was loaded.

    Attributes:
        predictor: Its signatures and methods; one of another process cannot be called here.
        batchable: For each method, whether requests may share a call; None if that is not known.
        device: Where it computes, "cpu" or "cuda"; None if its own code decides.
        device_bytes: What the process has of its GPU's memory, as far as is known.
        plan: How it was prepared for batches.
        calls: How many calls a process takes at a time.
    """

    predictor: Predictor
    batchable: Mapping[str, bool | None]
    device: str | None = None
    device_bytes: int = 0
    plan: BatchPlan = field(default_factory=BatchPlan)
    calls: int = 1


class _RemotePredictor(Predictor):
    def __init__(self, fields: Fields) -> None:
        self.signature = signature_from(fields["signature"])
        self.methods = tuple(map(str, fields["methods"]))
        self.text = _text_facts(fields.get("text"))
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
        calls = int(fields["calls"])
        if not 1 <= calls <= MOST_CALLS:
            raise ValueError("no such number of calls")
        size = max(0, int(fields.get("device_bytes", 0)))
        return DescribedModel(model, batchable, device, size, _plan(fields["plan"]), calls)
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"no description of a model: {exc!r}") from exc


def _plan(fields: Any) -> BatchPlan:
    """What a process says of its batches; it is shown, and decides how its own calls are cut."""
    within, graphs = fields["within"], fields["graphs"]
    return BatchPlan(
        str(fields["precision"])[:20],
        float(fields["tolerance"]),
        None if within is None else float(within),
        tuple(sorted({max(1, int(size)) for size in fields["sizes"][:_MOST_SIZES]})),
        None if graphs is None else str(graphs)[:200],
    )


def _text_facts(told: Any) -> Mapping[str, Any] | None:
    if told is None:
        return None
    return {"task": str(told["task"])[:80], "context": int(told["context"]), "chat": bool(told["chat"])}


def _check(signature: Signature) -> None:
    for spec in (*signature.inputs, *signature.outputs):
        received.shape([size for size in spec.shape or () if size is not None])
        if type(spec.name) is not str or not isinstance(spec.dtype, str | None):
            raise ValueError("no description of an array")
    if not all(type(name) is str for name in signature.columns or ()):
        raise ValueError("no names of columns")
