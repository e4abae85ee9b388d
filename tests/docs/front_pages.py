"""Writes the parts of README.md and docs/install.md that are lists of something in the repository.

`python -m tests.docs.front_pages` writes them; a test looks whether they are up to date.

| part | made of |
|---|---|
| README: features | the tables of frameworks, strategies, inputs and kinds of models |
| README: tested | the Makefile's parts and stamps, what `.ci/run` installs, the Pythons of `make wheels` |
| README: guides, and the old systems | the navigation of mkdocs.yml |
| Install: extras | pyproject.toml |

What has no words here yet is a KeyError: a new extra, part of the tests, server or kind of model is described
before the test passes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from kindler.estimator.inputs.recognise import KINDS
from kindler.models.registry import MODEL_KINDS
from kindler.sync.registry import SYNCS
from tests.docs.support import FRAMEWORKS_IN_WORDS, SOURCES_IN_WORDS
from tests.wheels.smoke import VERSIONS

__all__ = ["FRAMEWORKS_IN_WORDS", "INSTALL", "README", "install", "navigation", "pages_of", "readme"]

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
INSTALL = ROOT / "docs" / "install.md"
_WIDTH = 120

# What an extra is for; "installs" is read from pyproject.toml.
_FOR = {
    "spark": "Spark DataFrames and the `spark` engine",
    "java": "Spark on a machine without Java",
    "ship": '[`kindler.init(ship="venv")`](guides/spark-clusters.md#bring-your-environment)'
    " of conda environments",
    "torch": "PyTorch models",
    "keras": "Keras on an installed backend, such as PyTorch",
    "tensorflow": "Keras on TensorFlow",
    "tf-keras": "Keras 2 models",
    "jax": "Keras on JAX",
    "openvino": "[models of OpenVINO](guides/openvino.md), and fast scoring of others on CPUs",
    "compat": "programs of old systems, such as [Orca](guides/moving-from-orca.md);"
    " [TensorFlow graphs](guides/tensorflow-graphs.md)",
    "tensorflow1": "programs of TensorFlow 1: [TFPark](guides/moving-from-tfpark.md),"
    " [SparkFlow](guides/moving-from-sparkflow.md)",
    "mxnet": "[Gluon blocks](guides/mxnet.md), where no newer numpy is needed; see there",
    "serve": "[`kindler serve`](guides/serve.md)",
    "grpc": "gRPC in the server",
    "onnx": "ONNX models: in the server, the runtime and as callables; [`to_onnx`](guides/openvino.md)",
    "mlflow": "[runs logged to MLflow](guides/mlflow.md), and stored models as MLflow models",
    "broker": "the [runtime](guides/runtime.md) through Redis or RabbitMQ",
    "store": "the [store](guides/store.md) of models and datasets, in a folder",
    "postgres": "its catalog in PostgreSQL",
    "s3": "its blobs in S3, Google Cloud Storage or Azure",
    "sklearn": "scikit-learn models in the store",
    "remote": "checkpoints in object stores",
    "delta": "[Delta tables](guides/data.md#delta-and-iceberg) without Spark",
    "iceberg": "[Iceberg tables](guides/data.md#delta-and-iceberg) without Spark",
    "plot": "`History.plot()`",
    "tune": "[hyper-parameter search](guides/tuning.md)",
    "tensorboard": "event files (`callbacks.TensorBoard`)",
    "tfrecord": "[TFRecord files](guides/tfrecord.md), without TensorFlow; part of the core",
    "images": "`read_images`, `kindler.data.images`",
    "huggingface": "[models of Hugging Face](guides/huggingface.md)",
    "structured": "[answers that follow a JSON schema](guides/huggingface.md#structured-answers)",
    "peft": "[adapters such as LoRA](guides/huggingface.md#adapters)",
    "lightning": "[LightningModules](guides/lightning.md)",
    "all": "everything that goes together",
}
_KINDS = {
    "estimator": "",  # whatever is trained here
    "keras": "Keras",
    "tf_keras": "Keras",
    "peft": "peft",
    "huggingface": "Hugging Face",
    "torch": "PyTorch",
    "sklearn": "scikit-learn",
    "savedmodel": "SavedModel",
    "onnx": "ONNX",
    "openvino": "OpenVINO",
    "function": "functions",
    "pickle": "pickles (with `trusted=True`)",
}
# What the gate's parts run that a reader asks for; "" for parts of Kindler itself.
_PARTS = {
    "test-torch": "PyTorch and Lightning",
    "test-openvino": "OpenVINO and ONNX files",
    "test-tracking": "an MLflow server",
    "test-spark-cluster": "a standalone cluster on one machine",
    "test-compat-mxnet": "MXNet 1.9.1",
    "test-compat-orca": "programs of Orca, BigDL, omega\\|ml",
    "test-compat-tensorflow1": "TFPark, SparkFlow",
    "test-compat-tensorflowonspark": "TensorFlowOnSpark",
    **dict.fromkeys(
        [
            *(
                "test-spark-programs",
                "test-spark",
                "test-serve",
                "test-examples",
                "test-cluster",
                "test-unit",
            ),
            *(
                "test-runtime",
                "test-page",
                "test-store",
                "test-cli",
                "test-faults",
                "test-tune",
                "test-tfrecord",
            ),
            *("test-compat-docs", "test-compat-graphs"),
        ],
        "",
    ),
}
_FLAVOURS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch", "tf_keras": ""}
_SERVERS = {
    "postgresql": "PostgreSQL",
    "redis-server": "Redis",
    "rabbitmq-server": "RabbitMQ",
    "chromium": "Chromium",
    "curl": "",  # a tool
}
# What no program knows: what people run manually, and what has never been run.
_BY_HAND = (
    ("one NVIDIA H200", "manually, with `make test-gpu`"),
    (
        "several machines, YARN, Kubernetes, Databricks, several GPUs",
        "not run: [Deploy](docs/deploy/index.md)",
    ),
)
_GATE = "every run of the gate"


def main() -> int:
    README.write_text(readme(README.read_text()))
    INSTALL.write_text(install(INSTALL.read_text()))
    return 0


def readme(page: str) -> str:
    """The README with the lists of now."""
    for name, lines in (("features", _features()), ("tested", _tested()), ("guides", _guides())):
        page = _replaced(page, name, lines)
    return page


def install(page: str) -> str:
    """The page on installing with the extras of now."""
    return _replaced(page, "extras", ["", *_extras(), ""])  # MkDocs needs the blank lines


def _replaced(page: str, name: str, lines: Iterable[str]) -> str:
    begin, end = f"<!-- {name}: made by tests/docs/front_pages.py -->", f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no place for {name}: {begin} ... {end}")
    return "".join([before, begin, "\n", *(f"{line}\n" for line in lines), end, after])


def _table(*rows: tuple[str, ...]) -> Iterator[str]:
    head, *others = rows
    yield _row(*head)
    yield "|" + "---|" * len(head)
    yield from (_row(*row) for row in others)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _features() -> Iterator[str]:
    kinds = [_KINDS[row.name] for row in MODEL_KINDS.rows if "models" in row.shelves]
    strategies = [f'`"{spec.name}"`' for spec in SYNCS.built_in]
    return _table(
        ("what", "which"),
        ("models", "; ".join(title for title, _ in FRAMEWORKS_IN_WORDS.values())),
        ("`fit(strategy=...)`", ", ".join(strategies)),
        ("data", "; ".join(SOURCES_IN_WORDS[kind.__name__] for kind in KINDS)),
        ("stored and served", ", ".join(dict.fromkeys(filter(None, kinds)))),
        ("in which combinations", "[What works with what](docs/support.md)"),
    )


def _tested() -> Iterator[str]:
    makefile = (ROOT / "Makefile").read_text()
    parts = _parts(makefile)
    words = {
        part: _PARTS[part] for part in parts if not part.startswith(("test-keras-", "test-compat-keras-"))
    }
    older = sorted(re.findall(r"^\$\(VENV\)/\.spark-([\d.]+):", makefile, re.MULTILINE))
    flavours = [part.removeprefix("test-keras-") for part in parts if part.startswith("test-keras-")]
    keras = sorted(filter(None, (_FLAVOURS[flavour] for flavour in flavours)))
    frameworks = [words["test-torch"], f"Keras on {_and(keras)}"]
    frameworks += ["Keras 2"] * ("tf_keras" in flavours) + [
        words["test-openvino"],
        words["test-compat-mxnet"],
    ]
    spark = f"Spark {', '.join(older)} and newest: `local[n]`, Connect, {words['test-spark-cluster']}"
    old = [words[f"test-compat-{name}"] for name in ("orca", "tensorflow1", "tensorflowonspark")]
    run = (ROOT / ".ci" / "run").read_text()
    servers = [_SERVERS[name] for name in re.findall(r"servers\+=\(([\w-]+)\)", run)]
    s3 = ["an S3 server"] if '"moto[s3]' in (ROOT / "pyproject.toml").read_text() else []
    return _table(
        ("tested on", "how"),
        (spark, _GATE),
        ("; ".join(frameworks), _GATE),
        (", ".join(filter(None, [*servers, *s3, words["test-tracking"]])), _GATE),
        (", ".join(old), _GATE),
        (f"Python {VERSIONS[0]} to {VERSIONS[-1]}", "the wheels, with `make wheels`; the gate runs one"),
        *_BY_HAND,
    )


def _parts(makefile: str) -> list[str]:
    """The parts of the tests that `make gate` runs, one a pytest."""
    text = makefile.replace("\\\n", " ")
    lists = {name: re.findall(rf"^{name} :?= (.*)$", text, re.MULTILINE)[0] for name in _LISTS}
    flavours = {name: lists[name].split() for name in ("KERAS_FLAVOURS", "COMPAT_KERAS")}
    assert re.search(r"^gate:.*\n\t\$\(MAKE\) \$\(IN_TURN\) \$\(CHECKS\) \$\(PARTS\)", text, re.MULTILINE)
    plain = [
        word
        for name in ("CORE_PARTS", "COMPAT_PARTS")
        for word in re.findall(r"(?<![\w%-])test-[\w-]+(?![\w%-])", lists[name])
    ]
    keras = [f"test-keras-{one}" for one in flavours["KERAS_FLAVOURS"]]
    compat = [f"test-compat-keras-{one}" for one in flavours["COMPAT_KERAS"]]
    return list(dict.fromkeys([*plain, *keras, *compat]))


_LISTS = ("CORE_PARTS", "COMPAT_PARTS", "KERAS_FLAVOURS", "COMPAT_KERAS")


def _guides() -> list[str]:
    """Each section of the navigation by its first page, and each page that is in none."""
    links = []
    for tab, entries in navigation().items():
        if tab == "Migrate":  # the README names each of these systems
            continue
        found = [(title, next(pages_of(target))) for entry in entries for title, target in entry.items()]
        found = [("Architecture" if path == "architecture.md" else title, path) for title, path in found]
        # An index stands for its tab.
        index = [(tab, path) for _, path in found if path == f"{tab.lower()}/index.md"]
        links += [f"[{title}](docs/{path})" for title, path in index or found if path != "index.md"]
    links.append("[Examples and notebooks](examples/README.md)")
    return _wrapped(links)


def pages_of(entries: Any) -> Iterator[str]:
    """All pages below a part of the navigation."""
    if isinstance(entries, str):
        yield entries
    else:
        for entry in entries.values() if isinstance(entries, dict) else entries:
            yield from pages_of(entry)


def navigation() -> dict[str, list[dict[str, Any]]]:
    """The tabs of the documentation."""
    import yaml

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return {title: entries for tab in nav for title, entries in tab.items()}


def _wrapped(words: list[str]) -> list[str]:
    """Words with dots between them, in lines that are not too long."""
    lines = [""]
    for word in [*(f"{word} ·" for word in words[:-1]), words[-1]]:
        if len(lines[-1]) + 1 + len(word) > _WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    return lines


def _extras() -> Iterator[str]:
    extras = _optional_dependencies()
    rows = [(f"`{name}`", _installs(name, extras), _FOR[name]) for name in extras if name != "dev"]
    return _table(("extra", "installs", "for"), *rows)


def _installs(name: str, extras: dict[str, list[str]]) -> str:
    if name == "all":
        (line,) = extras[name]
        missing = [one for one in extras if one not in {*Requirement(line).extras, "dev", "all"}]
        return f"all of these but {_and([f'`{one}`' for one in _beside(missing, line, extras)])}"
    words = []
    for requirement in map(Requirement, extras[name]):
        if requirement.name == "kindler":
            words += [f"`{extra}`" for extra in re.findall(r"[\w-]+", str(requirement).partition("[")[2])]
        else:
            own = f" and its `{_and(sorted(requirement.extras))}`" if requirement.extras else ""
            words.append(requirement.name + _limits(requirement) + own)
    return ", ".join(words) or "nothing more"


def _beside(missing: list[str], line: str, extras: dict[str, list[str]]) -> list[str]:
    """Those that no extra of `all` brings along."""
    brought: set[str] = set()
    asked = set(Requirement(line).extras)
    while asked - brought:
        brought |= (name := (asked - brought).pop()) and {name}
        for requirement in map(Requirement, extras.get(name, ())):
            if requirement.name == "kindler":
                asked |= requirement.extras
    return [name for name in missing if name not in brought]


def _limits(requirement: Requirement) -> str:
    limits = {one.operator: one.version for one in requirement.specifier}
    if "==" in limits:
        return f" {limits['==']}"
    return (f" {limits['>=']}+" if ">=" in limits else "") + (
        f" (below {limits['<']})" if "<" in limits else ""
    )


def _optional_dependencies() -> dict[str, list[str]]:
    tomllib: Any = __import__("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, list[str]] = project["optional-dependencies"]
    return found


def _and(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


if __name__ == "__main__":
    sys.exit(main())
