"""What a stored estimator of scikit-learn computes with, by its file. Loads nothing.

A type is harmless if a file that lies about its fields gets wrong numbers, and no more. Those here compute
with numpy, which looks at every shape. What is compiled for one estimator (trees, neighbours, support
vectors, clusters) or makes sparse matrices of numbers from the file (one-hot codes, words) follows what the
file says without looking, and reads or writes wherever that leads.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from kindler.models.safety import allowed_names, objects_in

HARMLESS = allowed_names("scikit-learn values")
_WITH_NUMPY = allowed_names("scikit-learn with numpy")
# Losses, which only training computes.
_LOSSES = ("sklearn._loss.", "sklearn.linear_model._sgd_fast.")
_VALUES = frozenset(
    f"{name}Node"
    for name in (
        *("Json", "List", "Tuple", "Set", "Dict", "DefaultDict", "Slice", "Cached", "Bytes", "Bytearray"),
        *("NdArray", "DType", "Type", "Function"),
    )
)
_STATE_LENGTH = 624  # of numpy's Mersenne Twister, which does not look at where its state says it is


def compiled(path: Path) -> list[str]:
    """The types in a file of skops whose compiled code would believe what the file says."""
    with zipfile.ZipFile(path) as archive:
        schema = json.loads(archive.read("schema.json"))
    nodes = [part for part in objects_in(schema) if "__loader__" in part or "__class__" in part]
    named = [(node, f"{node.get('__module__')}.{node.get('__class__')}") for node in nodes]
    return sorted({name for node, name in named if not _is_harmless(node, name)})


def _is_harmless(node: dict[str, Any], name: str) -> bool:
    if node.get("__loader__") == "RandomStateNode":
        return _is_random_state(node)
    if not name.startswith("sklearn."):
        return node.get("__loader__") in _VALUES
    return name in HARMLESS or name.rpartition(".")[2] in _WITH_NUMPY or name.startswith(_LOSSES)


def _is_random_state(node: dict[str, Any]) -> bool:
    try:
        state = node["content"]["content"]
        where = json.loads(state["state"]["content"]["pos"]["content"])
        kind = json.loads(state["bit_generator"]["content"])
        return kind == "MT19937" and type(where) is int and 0 <= where <= _STATE_LENGTH
    except (KeyError, TypeError, ValueError):
        return False
