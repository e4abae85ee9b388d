"""The runner of mutation tests: what it changes, what it leaves alone, and what it says of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.mutants import ROOT, mutants
from tests.mutation.targets import EQUIVALENT, TARGETS, Target

MODULE = '''"""A module."""
LEAST = 2


def is_enough(count: int = 3) -> bool:
    """Whether it is."""
    assert count > 0, "checked by callers"
    if count < 0:
        raise ValueError(f"count={count - 1}")
    return count >= LEAST and True
'''
TESTS = """from planted import is_enough


def test_two_are_enough_and_one_is_not():
    assert is_enough(2)
    assert not is_enough(1)
"""


def planted(folder: Path) -> Path:
    path = folder / "src" / "planted.py"
    path.parent.mkdir()
    path.write_text(MODULE)
    return path


def changes_of(path: Path) -> set[str]:
    return {mutant.change for mutant in mutants(Target(str(path), ()))}


def test_what_decides_is_changed_and_what_only_speaks_is_not(tmp_path: Path) -> None:
    path = planted(tmp_path)

    assert changes_of(path) == {
        ": LEAST = 2 -> LEAST = 3",
        ": LEAST = 2 -> LEAST = 1",
        "is_enough: def is_enough(count: int = 3) -> bool: -> def is_enough(count: int = 4) -> bool:",
        "is_enough: def is_enough(count: int = 3) -> bool: -> def is_enough(count: int = 2) -> bool:",
        "is_enough: if count < 0: -> if (count <= 0):",
        "is_enough: if count < 0: -> if (count >= 0):",
        "is_enough: if count < 0: -> if count < 1:",
        "is_enough: if count < 0: -> if count < -1:",
        'is_enough: raise ValueError(f"count={count - 1}") -> pass',
        "is_enough: return count >= LEAST and True -> return None",
        "is_enough: return count >= LEAST and True -> return (count >= LEAST or True)",
        "is_enough: return count >= LEAST and True -> return (count > LEAST) and True",
        "is_enough: return count >= LEAST and True -> return (count < LEAST) and True",
        "is_enough: return count >= LEAST and True -> return count >= LEAST and False",
    }


def test_a_mutant_that_a_test_notices_is_killed_and_the_others_are_named(tmp_path: Path) -> None:
    path = planted(tmp_path)
    (tmp_path / "test_planted.py").write_text(TESTS)
    program = (
        "from tests.mutation.run import Target, survivors\n"
        f"target = Target({str(path)!r}, ({str(tmp_path / 'test_planted.py')!r},))\n"
        "count, missed = survivors(target, most=5)\n"
        "print(count, *sorted(mutant.change for mutant in missed), sep='\\n')\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{path.parent}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    count, *missed = done.stdout.splitlines()

    assert int(count) == 5
    assert missed == [
        "is_enough: def is_enough(count: int = 3) -> bool: -> def is_enough(count: int = 2) -> bool:",
        "is_enough: if count < 0: -> if count < 1:",
    ]
    assert path.read_text() == MODULE


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_mutants_and_tests_that_are_there(name: str) -> None:
    assert next(mutants(TARGETS[name]))
    assert all((ROOT / path).exists() for path in TARGETS[name].tests)


def test_every_equivalent_mutant_still_exists() -> None:
    changes = [mutant.change for target in TARGETS.values() for mutant in mutants(target)]

    assert [known for known in EQUIVALENT if not any(change.startswith(known) for change in changes)] == []
