"""What the user's program defines reaches workers, which do not have the program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cloudpickle

PROGRAM = """
import sys
from multiprocessing import get_context
from pathlib import Path

from kindler.frameworks.pickling import pickle_for_workers

WHO = "the program"

def model():
    return f"a model of {WHO}"

def in_a_child(path):
    Path(path).write_bytes(pickle_for_workers(model))

if __name__ == "__main__":
    child = get_context("spawn").Process(target=in_a_child, args=(sys.argv[1],))
    child.start()
    child.join()
"""


def test_functions_of_a_program_go_with_their_code_from_a_spawned_process_too(tmp_path: Path) -> None:
    program, pickled = tmp_path / "program.py", tmp_path / "pickled"
    program.write_text(PROGRAM)

    subprocess.run([sys.executable, str(program), str(pickled)], check=True, timeout=300)

    assert cloudpickle.loads(pickled.read_bytes())() == "a model of the program"
