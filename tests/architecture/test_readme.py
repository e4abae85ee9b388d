"""The README keeps what it promises, and no page denies what is there."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import kindler
import kindler_tfrecord
from kindler.frameworks.registry import FRAMEWORKS
from kindler.models.registry import MODEL_KINDS
from kindler.sync.registry import SYNCS
from tests.wheels.smoke import ROOT, VERSIONS, readme

DISTRIBUTIONS = {"sklearn": "scikit-learn"}
FLOWING = " ".join((ROOT / "README.md").read_text().split())


def test_the_pip_lines_install_what_the_examples_import() -> None:
    tomllib: Any = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines, programs = readme()
    asked = [Requirement(word) for line in lines for word in shlex.split(line)]
    installed = {requirement.name for requirement in asked}
    for requirement in asked:
        if requirement.name == "kindler":
            extras = [
                project["dependencies"],
                *(project["optional-dependencies"][e] for e in requirement.extras),
            ]
            installed |= {Requirement(text).name for extra in extras for text in extra}

    imported = {
        name.partition(".")[0]
        for program in programs
        for node in ast.walk(ast.parse(program))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    needed = {DISTRIBUTIONS.get(name, name) for name in imported - set(sys.stdlib_module_names)}
    assert needed
    assert needed <= installed


# Numbers of the README: the words around each, and its row in the recorded figures.
MEASURED = (
    (r"([\d.]+)x as fast as `predict_batch_udf`", "predict", "inline / `predict_batch_udf`"),
    (r"([\d.]+)x if its rows are in Parquet files", "predict", "direct / `predict_batch_udf`"),
    (r"([\d.]+)x as fast as PyTorch DDP", "train", "2 workers / DDP"),
    (r"second `fit` takes ([\d.]+) of TorchDistributor", "start", "second fit / `TorchDistributor`'s"),
    (r"([\d.]+)x as fast as a hand-written loop", "gpu", "MLP: steps as CUDA graphs / hand-written loop"),
    (r"a transformer ([\d.]+)x", "gpu", "transformer in bfloat16 / hand-written loop"),
    (r"killed worker costs ([\d.]+) s", "recovery", "PyTorch, until the next step"),
    (r"([\d.]+)x as many requests as MLServer at 64 clients", "serve", r".* \(mlserver, .*\), 64 clients"),
)


@pytest.mark.parametrize(("words", "benchmark", "name"), MEASURED)
def test_a_number_of_the_readme_is_one_that_was_measured(words: str, benchmark: str, name: str) -> None:
    shown = re.findall(words, FLOWING)
    rows = json.loads((ROOT / "benchmarks" / "figures.json").read_text())
    own = [row for row in rows if row["benchmark"] == benchmark]
    found = [row["median"] for row in own if row["name"] == name or re.fullmatch(name, row["name"])]
    assert len(shown) == len(found) == 1
    assert shown[0] == f"{found[0]:.{len(shown[0].partition('.')[2])}f}"


def test_every_number_of_the_bullets_has_its_row() -> None:
    bullets = FLOWING.partition(" - **")[2].partition(" ![")[0]
    numbers = re.findall(r"[\d.]*\d(?:x| s\b)", bullets)
    with_unit = [words for words, *_ in MEASURED if "+) of " not in words]
    measured = [number for words in with_unit for number in re.findall(words, bullets)]
    assert len(numbers) == len(measured)


PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("packages/*/*.md"), *ROOT.glob("docs/**/*.md")])
    if page.parent.name
    not in ("design", "migration")  # decisions of their day; differences, each with a test
]
DENIES = re.compile(
    r"\b(?:not (?:yet )?(?:been )?(?:supported|implemented|available)|unsupported|no support for|coming soon"
    r"|not yet|(?:cannot|can't) (?:yet )?(?:be )?(?:train|scor|serv|stor|export|evaluat)\w*"
    r"|does not (?:yet )?(?:train|score|serve|store|support))\b",
    re.IGNORECASE,
)
TITLES = (
    *("PyTorch", "Lightning", "Keras", "TensorFlow graphs?", "OpenVINO", "ONNX", "MXNet", "Hugging Face"),
    *("scikit-learn", "peft"),
)
TABLES = (FRAMEWORKS.built_in, SYNCS.built_in, MODEL_KINDS.rows)
NAMES = re.compile("|".join([*TITLES, *(rf'["`]{row.name}["`]' for table in TABLES for row in table)]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_denies_nothing_that_the_tables_have(page: Path) -> None:
    """Frameworks, strategies and kinds of models by name, beside "not yet", "not supported" and the like."""
    assert [s for s in sentences(page.read_text()) if DENIES.search(s) and NAMES.search(s)] == []


def sentences(text: str) -> list[str]:
    """The sentences, cells and list items of a page, without code blocks, comments and addresses of links."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    parts = re.split(r"\n\s*\n|\n(?=\s*[-*|#] ?)|(?<=[.!?:;])\s+(?=[A-Z`*\[])|\|", text)
    return [" ".join(part.split()) for part in parts if part.strip()]


def test_a_denial_is_seen() -> None:
    text = "A word.\n\n- MXNet is not yet\n  supported.\n- ONNX can be scored. Java is not supported.\n"
    found = [sentence for sentence in sentences(text) if DENIES.search(sentence) and NAMES.search(sentence)]
    assert found == ["- MXNet is not yet supported."]


# Rows of the page on compatibility, and the requirement that each is about.
LOWER_LIMITS = {
    "PyTorch": "torch",
    "TensorFlow": "tensorflow",
    "JAX": "jax",
    "transformers": "transformers",
    "Lightning": "lightning",
    "numpy": "numpy",
    "pandas": "pandas",
    "pyarrow": "pyarrow",
}


def test_the_page_on_compatibility_has_the_limits_and_the_versions_of_the_gate() -> None:
    tomllib: Any = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    asked = {one.name: str(one.specifier) for texts in lists for one in map(Requirement, texts)}
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = {cells[0]: cells for cells in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", page, re.MULTILINE)}
    for name, distribution in LOWER_LIMITS.items():
        (limit,) = re.findall(r">=([\d.]+)", asked[distribution])
        assert rows[name][1].startswith(f"{limit} or newer"), name
    makefile = (ROOT / "Makefile").read_text()
    older = sorted(re.findall(r"^\$\(VENV\)/\.spark-([\d.]+):", makefile, re.MULTILINE))
    assert rows["Spark"][2].startswith(", ".join(older))
    (torch,) = re.findall(r"^TORCH \?= torch==(\d+\.\d+)", makefile, re.MULTILINE)
    assert rows["PyTorch"][2].startswith(torch)
    assert rows["Python"][1] == f"{VERSIONS[0]} to {VERSIONS[-1]}"
    assert project["requires-python"] == f">={VERSIONS[0]}"


def test_the_wheel_says_that_it_has_types() -> None:
    assert (ROOT / "src" / "kindler" / "py.typed").is_file()  # hatch packs every file of the package


def test_the_distributions_of_one_release_ask_for_each_other() -> None:
    tomllib: Any = pytest.importorskip("tomllib")
    minor = ".".join(kindler.__version__.split(".")[:2])
    window = f">={minor},<0.{int(minor.partition('.')[2]) + 1}"
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    compat = tomllib.loads((ROOT / "packages/kindler-compat/pyproject.toml").read_text())["project"]
    assert f"kindler-tfrecord{window}" in core["dependencies"]
    assert core["optional-dependencies"]["compat"] == [f"kindler-compat{window}"]
    assert compat["dependencies"] == [f"kindler{window}"]
    assert kindler_tfrecord.__version__ == kindler.__version__
    assert f"## [{kindler.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
