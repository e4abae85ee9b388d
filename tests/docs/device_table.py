"""The tables of the GPU guide, made of what frameworks and kinds of models say of themselves.

`python -m tests.docs.device_table` writes them into the guide; a test looks whether they are up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from kindler.frameworks.keras.backends import BACKENDS
from kindler.frameworks.registry import FRAMEWORKS, FrameworkSpec
from kindler.models.registry import MODEL_KINDS, Row
from kindler.sync.registry import SYNCS

__all__ = ["GUIDE", "updated"]

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "gpus.md"
BEGIN, END = "<!-- devices: made by tests/docs/device_table.py -->", "<!-- end of devices -->"
_NONE = "no"
_TITLES = {
    "torch": "PyTorch",
    "torch_step": "PyTorch with your own training step",
    "lightning": "LightningModules",
    "keras": f"Keras on {', '.join(BACKENDS)}",
    "tf_graph": "TensorFlow graphs",
    "openvino": "OpenVINO",
    "mxnet": "MXNet",
}
_OF_GRAPHS = ("auto", "graphs")  # of a CPU's steps, "auto" makes what it would without


def main() -> int:
    GUIDE.write_text(updated(GUIDE.read_text()))
    return 0


def updated(page: str) -> str:
    """The page with the tables of now."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{GUIDE.name} has no place for the tables: {BEGIN} ... {END}")
    lines = ["", *_lines(), ""]  # Markdown needs a blank line between a comment and a table
    return "".join([before, BEGIN, "\n", *(f"{line}\n" for line in lines), END, after])


def _lines() -> Iterator[str]:
    yield from _table(
        ("framework", "train", "predict", "`precision=`", "`compile=`"),
        (_framework(FRAMEWORKS.spec(name)) for name in _TITLES),
    )
    yield ""
    yield from _table(
        ("stored model", "CPU", "GPU"), map(_kind, [*MODEL_KINDS.rows, MODEL_KINDS.row("tf_graph", {})])
    )
    yield ""
    yield from _table(("`strategy=`", "GPUs"), ((f"`{name}`", _ON_GPUS[name]) for name in SYNCS.names))


_ON_GPUS = {
    "allreduce": "PyTorch: NCCL between GPUs, or the memory of the machine where workers share one;"
    " others: that memory",
    "zero1": "as all-reduce; without `one_copy`",
    "fsdp": "NCCL; each worker needs its own GPU",
    "local_sgd": "weights are averaged through the memory of the machine",
    "async": "gradients travel through the memory of the machine to a server on the CPU",
}


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(head)
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _framework(row: FrameworkSpec) -> tuple[str, ...]:
    where = "CPU, GPU" if row.gpus else "CPU"
    modes = [f"`{mode}`" for mode in row.compile_modes if mode not in _OF_GRAPHS]
    graphs = [f"`{mode}`" for mode in row.compile_modes if mode in _OF_GRAPHS]
    shown = [*modes, f"{', '.join(graphs)} on GPUs"] if graphs else modes
    return (
        _TITLES[row.name],
        where if "train" in row.can else _NONE,
        where if "predict" in row.can else _NONE,
        ", ".join(f"`{one}`" for one in row.precisions) or "as it was made",
        ", ".join(shown) or _NONE,
    )


def _kind(row: Row) -> tuple[str, ...]:
    if row.name == "estimator":
        return ("`estimator`", "as its model", "as its model")
    return (f"`{row.name}`", "yes", "its own code decides" if row.takes_any else "yes" if row.gpus else _NONE)


if __name__ == "__main__":
    sys.exit(main())
