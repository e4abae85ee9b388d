"""The notebooks of examples/notebooks.

`python -m tests.examples.notebooks [NAME...]` executes them again and stores their outputs in place.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

__all__ = ["NOTEBOOKS", "code", "execute"]

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code(notebook: Path) -> str:
    """The cells of a notebook as one program."""
    cells = nbformat.read(notebook, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "code") + "\n"


def execute(notebook: Path) -> None:
    """Execute a notebook in a kernel of its own, and store it with its outputs; a failing cell raises."""
    content: Any = nbformat.read(notebook, as_version=4)
    NotebookClient(
        content,
        timeout=300,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": FOLDER}},
    ).execute()
    for cell in content.cells:
        if cell.cell_type == "code":  # warnings of Java and the like are not what a reader looks for
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    content.metadata["language_info"] = {"name": "python"}  # not the version of whoever executed it last
    nbformat.write(content, notebook)


if __name__ == "__main__":
    for path in NOTEBOOKS:
        if not sys.argv[1:] or path.stem in sys.argv[1:]:
            sys.stdout.write(f"{path.name}\n")
            execute(path)
