"""What ends a program is shown with its own lines, and none of Kindler's."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from kindler import RunSettings
from kindler.errors import ConfigError

PROGRAM = """
from kindler import RunSettings
from kindler.errors import TrainingError

def settings():
    return RunSettings(start_timeout_s=-1)

{call}
"""


def shown(tmp_path: Path, call: str) -> str:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(call=call))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return done.stderr


def test_an_error_of_kindlers_shows_the_lines_of_the_program_alone(tmp_path: Path) -> None:
    text = shown(tmp_path, "settings()")

    files = [line.split('"')[1] for line in text.splitlines() if line.startswith("  File ")]
    assert files == [str(tmp_path / "program.py")] * 2
    assert "return RunSettings(start_timeout_s=-1)" in text
    assert "ConfigError: " in text


def test_so_do_the_errors_that_led_to_it(tmp_path: Path) -> None:
    call = "try:\n    settings()\nexcept ValueError as error:\n    raise TrainingError('no run') from error"
    text = shown(tmp_path, call)

    files = {line.split('"')[1] for line in text.splitlines() if line.startswith("  File ")}
    assert files == {str(tmp_path / "program.py")}
    assert "The above exception was the direct cause" in text


def test_the_error_itself_keeps_all_frames_for_debuggers() -> None:
    with pytest.raises(ConfigError, match="start_timeout_s") as caught:
        RunSettings(start_timeout_s=-1)

    frames = traceback.extract_tb(caught.value.__traceback__)
    assert any("kindler" in frame.filename and frame.filename.endswith("config.py") for frame in frames)
