"""Imports go down only, however they are written: as statements, as strings, or by `import_module`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[import-not-found, no-redef]

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "src", ROOT / "packages/kindler-compat/src")  # of two distributions, one package
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LAYERS = [
    [part.strip() for part in layer.split("|")]
    for layer in next(contract["layers"] for contract in CONTRACTS if contract["id"] == "layers")
]
FLOOR = {part: len(LAYERS) - number for number, layer in enumerate(LAYERS) for part in layer}

# The only parts that may load a framework, by whatever means.
HOMES = {
    "pyspark": ("spark", "ml", "tune", "compat.sparkflow", "compat.tensorflowonspark", "compat.zoo.pipeline"),
    "py4j": ("spark",),
    "torch": (
        "frameworks.torch",
        "frameworks.keras",
        "models",
        "cluster.feed",
        "compat.zoo",
        "compat.bigdl",
    ),
    "torchmetrics": ("frameworks.torch", "compat.bigdl"),
    "transformers": ("models", "frameworks.torch"),
    "lightning": (),
    "keras": ("frameworks.keras", "models", "compat.zoo"),
    "tf_keras": ("frameworks.keras", "models", "compat"),
    "tensorflow": (
        "frameworks.keras",
        "models",
        "shelves._tfrecord",
        "cluster.feed",
        "cluster.context",
        "compat",
    ),
    "jax": ("frameworks.keras", "models"),
    "mxnet": ("compat.frameworks.mxnet", "compat.mxnet"),
    "openvino": ("frameworks.openvino", "models"),
    "onnxruntime": ("models",),
    "mlflow": ("tracking",),
    "optuna": ("tune",),
}
# Names that have moved up are found where they were, with a warning; and `est.as_stage()` is a door upward.
ALIASES = {
    ("kindler.data.tfrecord", "kindler.tfrecord"),
    ("kindler.estimator.estimator", "kindler.ml"),
}
_NAME = re.compile(r"kindler(\.\w+)+(:\w+)?")


def module_of(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path, root): path for root in SOURCES for path in sorted(root.glob("kindler/**/*.py"))}


def known(name: str) -> str | None:
    """The module that a dotted name is in; None where there is no such module."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name if name in MODULES and name != "kindler" else None


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All that runs: neither what only type checkers see nor docstrings."""
    for child in ast.iter_child_nodes(tree):
        if is_for_types(child) or (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
            continue
        yield child
        yield from nodes(child)


def imported(module: str, tree: ast.AST) -> Iterator[str]:
    """What import statements name, packages of others included."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "imported")):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def named(tree: ast.AST) -> Iterator[str]:
    """The modules that strings name."""
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
            yield node.value.partition(":")[0]


TREES = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}
IMPORTS = {module: sorted(set(imported(module, tree))) for module, tree in TREES.items()}
STRINGS = {module: sorted(set(named(tree))) for module, tree in TREES.items()}


def part(module: str) -> str:
    return module.split(".")[1]


def inside(module: str, folder: str) -> bool:
    return f"{module}.".startswith(f"kindler.{folder}.")


def test_neither_imports_nor_strings_reach_upward_or_sideways() -> None:
    wrong = [
        f"{module} -> {name}"
        for module in MODULES
        if module != "kindler"
        for name in {*IMPORTS[module], *STRINGS[module]}
        if (target := known(name)) is not None
        and (module, target) not in ALIASES
        and part(target) != part(module)
        and FLOOR[part(target)] >= FLOOR[part(module)]
    ]

    assert not wrong


def test_the_core_knows_nothing_of_kindler_compat() -> None:
    wrong = [
        f"{module} -> {name}"
        for module, path in MODULES.items()
        if path.is_relative_to(SOURCES[0]) and module not in ("kindler", "kindler.compat")
        for name in {*IMPORTS[module], *STRINGS[module]}
        if name.startswith("kindler.compat")
    ]

    assert not wrong


@pytest.mark.parametrize("package", HOMES)
def test_a_framework_is_loaded_in_its_own_folders_only(package: str) -> None:
    wrong = [
        f"{module} -> {name}"
        for module, names in IMPORTS.items()
        for name in names
        if name.partition(".")[0] == package and not any(inside(module, home) for home in HOMES[package])
    ]

    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: {
            target
            for name in IMPORTS[module]
            if (target := known(name)) not in (None, module) and (module, target) not in ALIASES
        }
        for module in MODULES
        if module != "kindler"
    }

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def test_the_picture_of_the_layers_is_that_of_the_contracts() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    picture = text.partition("## Layers")[2].split("```")[1]

    assert [[part.strip() for part in line.split("|")] for line in picture.strip().splitlines()] == LAYERS
