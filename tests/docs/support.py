"""Writes `docs/support.md` from the tables of frameworks, syncs and inputs: `python -m tests.docs.support`.

No framework is imported: what a framework's class overrides is read from its source.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from kindler.estimator.inputs.contract import Input
from kindler.estimator.inputs.recognise import KINDS
from kindler.frameworks.registry import FRAMEWORKS, FrameworkSpec
from kindler.sync.registry import SYNCS, SyncSpec

__all__ = ["FRAMEWORKS_IN_WORDS", "PAGE", "SOURCES_IN_WORDS", "text"]

PAGE = Path(__file__).parents[2] / "docs" / "support.md"

# What users call the rows of the tables, those of kindler-compat included.
FRAMEWORKS_IN_WORDS = {
    "torch": ("PyTorch, Hugging Face", "`from_torch`, `from_huggingface`"),
    "torch_step": ("PyTorch with your own training step", "`from_torch(train_step=...)`"),
    "lightning": ("LightningModules", "`from_lightning`"),
    "keras": ("Keras 3 on TensorFlow, JAX and PyTorch; Keras 2", "`from_keras`"),
    "tf_graph": ("TensorFlow graphs and model functions", "`from_graph`, `from_model_fn`"),
    "openvino": ("OpenVINO and ONNX files", "`from_openvino`"),
    "mxnet": ("MXNet 1.9.1", "`from_mxnet`"),
}
# Where an extra alone is not enough.
_INSTALL = {"tf_graph": "`kindler[compat,tensorflow]`", "mxnet": "see [MXNet](guides/mxnet.md)"}
SOURCES_IN_WORDS = {
    "FrameInput": "Spark DataFrame",
    "ShardsInput": "XShards",
    "ParquetInput": "Parquet files, Delta and Iceberg tables",
    "LoaderInput": "loaders, `tf.data`, data creators",
    "DatasetInput": "torch and Hugging Face datasets",
    "ArrowInput": "Polars, DuckDB and others that give Arrow",
    "MemoryInput": "numpy, pandas, Arrow",
}
_HEAD = """\
<!-- Made by `python -m tests.docs.support` from the tables in src/kindler: change those instead. -->

# What works with what

Frameworks, strategies, engines and kinds of data are independent of each other, so nearly every combination
works. These tables are generated from the code.

"""


def text() -> str:
    """The page."""
    return _HEAD + "\n".join([_of_frameworks(), _of_combinations(), _of_sources(), _of_syncs()])


def _of_frameworks() -> str:
    verbs = ("train", "evaluate", "predict", "export")
    lines = [
        _row(
            *FRAMEWORKS_IN_WORDS[spec.name],
            _INSTALL.get(spec.name, f"`kindler[{spec.extra}]`"),
            *(_yes(verb in spec.can) for verb in verbs),
        )
        for spec in _frameworks()
    ]
    head = _row("framework", "`Estimator.`", "install", *verbs)
    told = (
        '\n"export" is `to_onnx` and `to_openvino`. Other frameworks can be added as'
        " [plug-ins](architecture.md).\n"
    )
    return f"## Frameworks\n\n{head}\n{_rule(7)}\n" + "\n".join(lines) + f"\n{told}"


def _of_combinations() -> str:
    lines = [
        _row(FRAMEWORKS_IN_WORDS[spec.name][0], *(_yes(_trains(spec, sync)) for sync in _syncs()))
        for spec in _frameworks()
        if "train" in spec.can
    ]
    head = _row("framework", *(f'`"{sync.name}"`' for sync in _syncs()))
    return (
        "## Training: which strategies each framework supports\n\n"
        f"{head}\n{_rule(1 + len(_syncs()))}\n" + "\n".join(lines) + "\n\n"
        "Every supported combination works with every kind of data, on both engines.\n"
    )


def _trains(spec: FrameworkSpec, sync: SyncSpec) -> bool:
    if spec.strategies is not None:
        return sync.name in spec.strategies
    return not sync.divides or "fuse" in _own(spec)


def _of_sources() -> str:
    lines = [
        _row(
            SOURCES_IN_WORDS[kind.__name__],
            _engines(kind),
            _yes(kind.has_columns),
            _yes(not _refuses_scoring(kind)),
        )
        for kind in KINDS
    ]
    head = _row("data", "`fit` and `evaluate` on", "columns can be chosen", "`predict`")
    return (
        f"## Data\n\n{head}\n{_rule(4)}\n" + "\n".join(lines) + "\n\n"
        '`engine="auto"` selects the engine that is named first; XShards stay where they are.\n'
    )


def _of_syncs() -> str:
    lines = [
        _row(
            f'`"{sync.name}"`',
            _yes(sync.together),
            _replaced(sync),
            "parameter servers" if sync.server else "nothing",
            "the optimizer and the parameters"
            if sync.cuts
            else "the optimizer"
            if sync.divides
            else "nothing",
        )
        for sync in _syncs()
    ]
    head = _row(
        "`strategy=`",
        "all workers run at once",
        "a lost worker is replaced during the run",
        "in addition to workers",
        "divides",
    )
    return f"## Strategies\n\n{head}\n{_rule(5)}\n" + "\n".join(lines) + "\n"


def _replaced(sync: SyncSpec) -> str:
    if getattr(SYNCS.load(sync.name), "regroups", False):
        return "[PyTorch and Keras 3 models](guides/checkpoints.md#lost-workers)"
    if sync.name == "zero1":
        return "[PyTorch models](guides/checkpoints.md#lost-workers)"
    return _yes(sync.replaceable)


def _frameworks() -> list[FrameworkSpec]:
    return [FRAMEWORKS.spec(name) for name in FRAMEWORKS_IN_WORDS]


def _syncs() -> list[SyncSpec]:
    return [spec for spec in SYNCS.built_in if isinstance(spec, SyncSpec)]


def _engines(kind: type[Input]) -> str:
    return "Spark, local" if kind.engine == "spark" else "local, Spark"


def _refuses_scoring(kind: type[Input]) -> bool:
    return kind.score_complaints is not Input.score_complaints and not kind.has_columns


def _own(spec: FrameworkSpec) -> set[str]:
    """The names that a framework's class defines itself."""
    module, _, name = spec.target.partition(":")
    found = importlib.util.find_spec(module.rpartition(".")[0])
    assert found is not None
    source = Path(str(found.origin)).parent / f"{module.rpartition('.')[2]}.py"
    tree = ast.parse(source.read_text())
    (made,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        target
        for node in made.body
        for target in (
            [node.name]
            if isinstance(node, ast.FunctionDef)
            else [t.id for t in getattr(node, "targets", ()) if isinstance(t, ast.Name)]
        )
    }


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(width: int) -> str:
    return "|" + "---|" * width


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


if __name__ == "__main__":
    PAGE.write_text(text())
