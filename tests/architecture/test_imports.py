"""Importing kindler is light, and what is missing is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = f"{ROOT / 'src'}:{ROOT / 'packages/kindler-tfrecord/src'}"
HEAVY = (
    "pyspark",
    "py4j",
    "torch",
    "tensorflow",
    "jax",
    "keras",
    "pandas",
    "matplotlib",
    "sklearn",
    "pyarrow",
    "numpy",
)


def fresh(code: str) -> object:
    """Run code in a process of its own; it prints one line of JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": SRC}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def loaded_by(statement: str) -> set[str]:
    code = f"import json, sys\n{statement}\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    return set(fresh(code))  # type: ignore[call-overload]


def test_importing_kindler_loads_neither_pyspark_nor_a_framework() -> None:
    assert loaded_by("import kindler") == set()


@pytest.mark.parametrize(
    "module",
    [
        "estimator",
        "train.run",
        "engine.local",
        "frameworks.registry",
        "inference.predictor",
        "xshards",
        "storage",
        "readers",
        "features",
        "cli",
    ],
)
def test_no_part_of_the_core_loads_pyspark_or_a_framework(module: str) -> None:
    assert loaded_by(f"import kindler.{module}") <= {"numpy", "pyarrow"}


def test_every_public_name_is_there_and_no_other() -> None:
    code = """
import json, kindler
names = {name: type(getattr(kindler, name)).__name__ for name in kindler.__all__}
public = kindler.__all__
print(json.dumps([sorted(names) == sorted(public), public == sorted(public), len(public) <= 26]))
"""
    assert fresh(code) == [True, True, True]


def test_the_parts_that_pages_name_are_attributes_of_kindler() -> None:
    parts = [
        "callbacks",
        "ml",
        "tune",
        "cluster",
        "tfrecord",
        "data",
        "store",
        "runtime",
        "serve",
        "testing",
        "errors",
        "features",
        "strategies",
        "types",
    ]
    code = f"""
import json, kindler
print(json.dumps([getattr(kindler, part).__name__ for part in {parts}] + [kindler.data.images.__name__]))
"""
    assert fresh(code) == [f"kindler.{part}" for part in [*parts, "data.images"]]


def test_an_unknown_name_is_an_attribute_error() -> None:
    import kindler

    with pytest.raises(AttributeError, match="no attribute 'Estimater'"):
        kindler.Estimater  # noqa: B018


def test_without_kindler_compat_it_is_named_with_its_extra() -> None:
    code = """
import json, sys
sys.path[:] = [entry for entry in sys.path if "kindler-compat" not in entry]
import kindler
said = []
for line in ("kindler.compat", "import kindler.compat.zoo.orca"):
    try:
        exec(line)
    except ImportError as exc:
        said.append([type(exc).__name__, exc.extra, "pip install 'kindler[compat]'" in str(exc)])
print(json.dumps(said))
"""
    assert fresh(code) == [["MissingExtraError", "compat", True]] * 2


def test_spark_missing_is_named_with_its_extra(tmp_path: Path) -> None:
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError('no pyspark', name='pyspark')")
    code = f"""
import json, sys
sys.path.insert(0, {str(tmp_path)!r})
import kindler
try:
    kindler.init()
except ImportError as exc:
    print(json.dumps([type(exc).__name__, exc.extra, "pip install 'kindler[spark]'" in str(exc)]))
"""
    assert fresh(code) == ["MissingExtraError", "spark", True]


def test_the_help_of_the_command_takes_less_than_a_third_of_a_second() -> None:
    """In CPU time, so that other programs do not count; it takes a quarter of that."""
    code = (
        "import json, resource, subprocess, sys\n"
        "def spent():\n"
        "    used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "    return used.ru_utime + used.ru_stime\n"
        "times = []\n"
        "for _ in range(3):\n"
        "    before = spent()\n"
        "    subprocess.run([sys.executable, '-m', 'kindler', '--help'], check=True, stdout=-3)\n"
        "    times.append(spent() - before)\n"
        "print(json.dumps(min(times)))"
    )
    taken = fresh(code)
    assert isinstance(taken, float)
    assert taken < 0.3
