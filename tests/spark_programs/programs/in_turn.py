"""Programs one after another in one process, so that they share a Spark session and a warm process.

    python in_turn.py '[["shards.py", "connect"], ["connect.py", "FOLDER"]]'

Prints, as JSON, what each of them printed, or the traceback of one that failed.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import traceback
from pathlib import Path


def outcome(program: str, *arguments: str) -> dict[str, str]:
    """What a program printed as `__main__`, so that its functions and classes travel by value."""
    sys.argv = [program, *arguments]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(Path(__file__).with_name(program)), run_name="__main__")
    except Exception:
        return {"failed": traceback.format_exc()}
    return {"printed": printed.getvalue()}


if __name__ == "__main__":
    outcomes = [outcome(*words) for words in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(outcomes))
