"""How long does it take from `cluster.run` until the program begins on two nodes?

On the local engine and on Spark with two slots; the first cluster of a driver, which also imports TensorFlow
once for both nodes, and the next one.
"""

from __future__ import annotations

import time
from typing import Any

from _bench import Report, arguments, spark_session

from kindler import cluster

MODES = ("program", "spark")


def main() -> None:
    given = arguments(__doc__, repeats=3)
    report = Report("cluster_start", "seconds from run() to main_fun on 2 nodes", quick=given.quick)
    spark = spark_session(2)
    for name, session in (("local engine", None), ("Spark", spark)):
        for mode in MODES:
            first = started(session, mode)
            next_ones = [started(session, mode) for _ in range(given.repeats)]
            report.figure(f"{name}, input_mode={mode!r}, first", [first], "s")
            report.figure(f"{name}, input_mode={mode!r}, next", next_ones, "s")
    report.finish()


def started(spark: Any, mode: Any) -> float:
    """Seconds until the last of the two nodes has begun."""
    began = time.time()
    with cluster.run(now, None, 2, spark=spark, input_mode=mode) as running:
        pass
    return max(running.return_values) - began


def now(args: Any, ctx: Any) -> float:
    return time.time()


if __name__ == "__main__":
    main()
