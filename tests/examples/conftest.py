"""Examples, how-to programs and notebooks run one after another in one process, once for all tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SHARED
from tests.examples.notebooks import NOTEBOOKS, code
from tests.in_turn import Printed, run_in_turn
from tests.whole import WHOLE

EXAMPLES = Path(__file__).parents[2] / "examples"
HOWTOS = sorted((EXAMPLES / "howto").glob("*.py"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of them run; nothing else is in it."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="session")
def printed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """What each program printed, and each notebook, whose cells are written as a program.

    They share PyTorch, Java and a warm process.
    """
    cells = tmp_path_factory.mktemp("cells")
    for notebook in NOTEBOOKS:
        (cells / f"{notebook.stem}_cells.py").write_text(code(notebook))
    on_mnist = ("mnist_spark.py", "--data", SHARED / "mnist", "--rows", "2000", "--epochs", "3")
    on_cifar = ("png_images.py", "--data", SHARED / "cifar10-mini", "--rows", "750", "--epochs", "4")
    examples = [
        ("custom_callback.py",),
        ("lost_worker.py",),
        ("parquet_to_parquet.py",),
        ("quickstart.py", "--plot", "training.png"),
        ("first_steps.py",),
        ("imbalanced.py", "--rows", "3000", "--epochs", "8"),
        ("huggingface_text.py", "--rows", "240", "--epochs", "4"),
        ("gan.py", "--rows", "1000", "--epochs", "40"),
        ("lightning_module.py", "--rows", "600", "--epochs", "6"),
        *([on_mnist] if (SHARED / "mnist").is_dir() else []),
        *([on_cifar] if (SHARED / "cifar10-mini").is_dir() else []),
    ]
    programs: list[tuple[Any, ...]] = [
        *[(EXAMPLES / name, *arguments) for name, *arguments in examples],
        *[(path,) for path in (*HOWTOS, *(sorted(cells.glob("*.py")) if WHOLE else ()))],
    ]
    return run_in_turn(
        folder,
        *sorted(programs, key=lambda words: starts_spark(Path(words[0]))),
        warm=True,
        limit_s=1700,
        MPLBACKEND="agg",
    )


def starts_spark(program: Path) -> bool:
    """Programs that do come last: the others run on local processes, as for their reader, and cheaper."""
    text = program.read_text()
    return "kindler.init(" in text or "SparkSession" in text
