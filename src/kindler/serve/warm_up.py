"""A model's first calls, with made-up rows: ahead of clients, and to see whether requests can share one."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from kindler.models.predictor import Predictor
from kindler.models.row_independence import tried
from kindler.models.signature import Arrays, TensorSpec, example

_log = logging.getLogger("kindler.serve")


def warmed(servable: Predictor, *, alone: bool) -> dict[str, bool | None]:
    """Call it, so that what happens at a first call does not happen at a client's.

    Its signature gets the outputs of the first method, if it did not know them.

    Returns:
        For each method, whether requests may share a call; None if that is not known yet.
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
                found[method] = tried(partial(_called, servable, method), given, 1).per_row
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
