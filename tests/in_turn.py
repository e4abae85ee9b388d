"""Programs that run one after another in one process, to share a Spark session and a warm process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.warm_daemon import environment

__all__ = ["Printed", "run_in_turn"]

ROOT = Path(__file__).parents[1]

Printed = Callable[[str], str]

# Python workers of older Sparks may print this where their task is given up; it is not the program's.
_WAITED_IN_VAIN = re.compile(
    r"Traceback \(most recent call last\):\n"
    r'  File "[^"]*/pyspark/daemon\.py", .*\n(?:    .*\n|  File "[^"]*/pyspark/.*\n)*'
    r"(?:EOFError|ConnectionResetError: .*)\n"
)


def run_in_turn(
    folder: Path,
    *programs: Sequence[object],
    paths: Sequence[Path] = (),
    quiet: bool = True,
    warm: bool = False,
    limit_s: float = 570,
    **environ: str,
) -> Printed:
    """Run programs, each a path with its arguments, in a process of their own.

    Args:
        folder: Where they run.
        programs: The path of each program and its arguments.
        paths: Where Python looks first.
        quiet: They must not show Spark's insides, or a traceback, where they end well.
        warm: Spark's Python workers come from `tests/warm_daemon.py`.
        limit_s: How long they may take together, in seconds.
        environ: Variables of the process.

    Returns:
        What a program printed, by the name of its file.
    """
    words = [[str(word) for word in program] for program in programs]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, json.dumps(words)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                map(str, (*paths, ROOT / "src", ROOT / "packages/kindler-tfrecord/src", ROOT))
            ),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **(environment() if warm else {}),
            **environ,
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shown = _WAITED_IN_VAIN.sub("", done.stderr)
    outcomes = {
        Path(path).name: outcome for (path, *_), outcome in zip(words, json.loads(done.stdout), strict=True)
    }

    def printed(name: str) -> str:
        assert "failed" not in outcomes[name], outcomes[name]["failed"]
        for sign in ("at org.apache.spark", "Traceback"):
            assert not quiet or sign not in shown, done.stderr[-4000:]
        said: str = outcomes[name]["printed"]
        return said

    return printed


def _outcome(program: str, *arguments: str) -> dict[str, str]:
    """What a program printed as `__main__`, so that its functions and classes travel by value."""
    sys.argv = [program, *arguments]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(program, run_name="__main__")
    except Exception:
        return {"failed": traceback.format_exc()}
    return {"printed": printed.getvalue()}


if __name__ == "__main__":
    import kindler

    kindler.stop = lambda: None  # a session, with its Java, goes on until the last program has run
    outcomes = [_outcome(*words) for words in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(outcomes))
