"""Parts of the core on a Spark Connect session; prints what was seen as one line of JSON.

A program that tests/spark_programs runs with others in one process, which has the session.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import kindler
from kindler.engine.job import Job, equal_ranks
from kindler.spark import engine
from kindler.spark.executors import slots_without_a_job
from tests.unit.with_spark import direct_facts


def direct_scans(spark: Any, folder: str) -> dict[str, str | None]:
    """Why each of the frames of `direct_facts` is not a plain scan, or None."""
    seen = {}
    for name in direct_facts.ON_CONNECT:
        place = os.path.join(folder, name)
        os.mkdir(place)
        seen[name] = direct_facts.outcome(spark, direct_facts.CASES[name], place)
    return seen


def echoed(spark: Any) -> list[Any]:
    """What a running worker gives back of what it was fed; the slots, while workers have all of them."""
    with engine.start(Job(ranks=equal_ranks("tests.unit.gang_targets:echo", 2)), spark=spark) as gang:
        gang.push(0, "rows", b"through Connect")
        slots = slots_without_a_job(spark)
        gang.feed(0, "rows").end()
        gang.feed(1, "rows").end()
        rows = [batch[0].decode() for batch in gang.output(0, "echoed")]
        gang.wait()
    return [*rows, slots]


def main(folder: str) -> None:
    spark = kindler.init()
    print(json.dumps({"echoed": echoed(spark), "direct": direct_scans(spark, folder)}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
