"""Spark's Python daemon for these tests: a run that fails does not end the warm process of Kindler's workers.

That process has PyTorch imported, which would be most of what a test of a failure costs; see `tests/warm.py`.
Spark starts this file instead of `pyspark.daemon`, and its tasks inherit what is replaced here.
"""

from __future__ import annotations

import os

from pyspark import daemon

from kindler.engine import fork_server

COLD = "KINDLER_TEST_COLD"  # names a file; while it exists, a failed run ends the warm process as for users
_retire = fork_server.retire


def _if_asked(owner: int | None = None) -> None:
    if os.path.exists(os.environ[COLD]):
        _retire(owner)


if __name__ == "__main__":
    fork_server.retire = _if_asked
    daemon.manager()
