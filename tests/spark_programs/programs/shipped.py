"""Runs in a small environment that is shipped to a cluster; prints what its executors run in, as JSON.

`python shipped.py MASTER`
"""

from __future__ import annotations

import json
import sys

import kindler
from kindler.spark.executors import check_executors, executor_pythons


def main(master: str) -> None:
    spark = kindler.init(master, ship="venv", conf={"spark.cores.max": "2"})
    check_executors(spark)
    found = executor_pythons(spark, ("kindler", "numpy", "pyarrow", "torch"))
    again = kindler.init(ship="venv") is spark
    print(json.dumps([again, [[one.executable, one.versions] for one in found]]))  # noqa: T201
    kindler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
