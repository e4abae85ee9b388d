"""What the tests themselves keep to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Raised for one reason only, so that the class says it all.
SAYS_ALL = {
    *(
        "ChannelClosed",
        "ClientGoneError",
        "ConnectionError",
        "ConnectionRefusedError",
        "Damaged",
        "DamagedError",
    ),
    *("FileNotFoundError", "FrameError", "KeyboardInterrupt", "NotFittedError", "TaskCancelledError"),
    *("TimeoutError", "UntrustedError", "ZeroDivisionError", "error"),
}


def raises_without_a_look_at_the_error(tree: ast.AST) -> Iterator[int]:
    """Lines of `raises` of an error with many causes that have neither `match=` nor `as`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.With):
            continue
        for item in node.items:
            call = item.context_expr
            if (
                isinstance(call, ast.Call)
                and ast.unparse(call.func) == "pytest.raises"
                and item.optional_vars is None
                and ast.unparse(call.args[0]) not in SAYS_ALL
                and not any(keyword.arg == "match" for keyword in call.keywords)
            ):
                yield call.lineno


def test_whoever_expects_an_error_looks_at_it() -> None:
    """Another error of the same class would pass for the one that is meant."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in ("tests", "packages/kindler-compat/tests", "packages/kindler-tfrecord/tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in raises_without_a_look_at_the_error(ast.parse(path.read_text()))
    ]
    assert not found, "pytest.raises without match="
