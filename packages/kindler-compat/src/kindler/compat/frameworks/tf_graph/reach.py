"""What a tensor of a graph depends on, found without running anything."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

PLACEHOLDERS = ("Placeholder", "PlaceholderV2")
VARIABLES = ("VarHandleOp", "VariableV2", "Variable")


def needed(targets: Iterable[Any], *, fed: Collection[str] = ()) -> dict[str, Any]:
    """Every operation that must run to get the targets, by name, the targets' own included.

    Args:
        targets: Tensors and operations.
        fed: Names of tensors whose values are given, so that nothing before them has to run.
    """
    given = frozenset(fed)
    found: dict[str, Any] = {}
    waiting = [op_of(target) for target in targets if getattr(target, "name", "") not in given]
    while waiting:
        op = waiting.pop()
        if op.name in found:
            continue
        found[op.name] = op
        waiting.extend(tensor.op for tensor in op.inputs if tensor.name not in given)
        waiting.extend(op.control_inputs)
    return found


def op_of(target: Any) -> Any:
    """The operation of a tensor; an operation itself."""
    return getattr(target, "op", target)
