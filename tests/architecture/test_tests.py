"""What the tests themselves keep to."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPAT = "packages/kindler-compat"
FOLDERS = ("tests", f"{COMPAT}/tests", "packages/kindler-tfrecord/tests")
# Raised for one reason only, so that the class says it all.
SAYS_ALL = {
    *(
        "ChannelClosed",
        "ClientGoneError",
        "ConnectionError",
        "ConnectionRefusedError",
        "DamagedCheckpointError",
        "DamagedError",
    ),
    *("FileNotFoundError", "FrameError", "KeyboardInterrupt", "NotFittedError", "TaskCancelledError"),
    *("TimeoutError", "UntrustedError", "ZeroDivisionError", "error"),
}


@functools.cache
def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


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
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in raises_without_a_look_at_the_error(parsed(path))
    ]
    assert not found, "pytest.raises without match="


# Names that anybody may import: those of the Reference, its tables of what plug-ins build on included.
REFERENCE = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
PUBLIC = set(re.findall(r"kindler(?:\.\w+)+", REFERENCE))
# They look inside on purpose: units, what the source itself keeps to, how the processes of tests start, and
# the tables of the documentation, which are made of the code's own.
INSIDE = (
    *("tests/unit/", "tests/architecture/"),
    *("tests/warm.py", "tests/warm_daemon.py", "tests/docs/device_table.py", "tests/docs/support.py"),
    "tests/docs/front_pages.py",
)
# Not through public doors yet.
STILL_INSIDE = (
    *("tests/serve/", "tests/store/", "tests/runtime/", "tests/gpu/", f"{COMPAT}/tests/omegaml/"),
    f"{COMPAT}/tests/bigdl/test_criteria.py",
)


def is_public(name: str) -> bool:
    """Of a dotted name: it is on the page, or in a module that is, or on the way to one that is."""
    return any(f"{name}.".startswith(f"{one}.") or one.startswith(f"{name}.") for one in PUBLIC)


def names_of_the_core(tree: ast.AST) -> Iterator[str]:
    """What is imported of Kindler, in programs that are strings too, and what is replaced in it."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = re.findall(r"from (kindler[\w.]*) import ([\w, ]+)", node.value)
            names = [f"{module}.{name.strip()}" for module, few in found for name in few.split(",")]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            names = [part.value for part in node.args[:1] if isinstance(part, ast.Constant)]
        yield from (name for name in names if re.match(r"kindler(\.(?!compat\b)|$)", name))


def test_only_units_import_what_is_not_public() -> None:
    """Whoever tests what users do must not hold on to how it is done."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        if not path.relative_to(ROOT).as_posix().startswith((*INSIDE, *STILL_INSIDE))
        for name in names_of_the_core(parsed(path))
        if not is_public(name)
    ]
    assert len(files) > 300
    assert not found, "move it to tests/unit, or go through a name of docs/reference/"
