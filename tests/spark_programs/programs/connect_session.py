"""The Connect session that runs is used and ended, and a classic one follows; prints what was seen as JSON.

It comes last of the programs that share a process: `kindler.stop`, which does nothing there, is taken from
where it is defined.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from kindler.spark.session import init, running, stop
from kindler.spark.versions import is_connect


def main() -> None:
    begun = dict(
        part.split("=", 1) for part in Path("/proc/self/environ").read_text().split("\0") if "=" in part
    )
    spark = running()
    assert spark is not None
    again = init(conf={"spark.sql.shuffle.partitions": 7})
    seen = [is_connect(spark), again is spark, spark.conf.get("spark.sql.shuffle.partitions")]
    seen.append(spark.range(5).count())
    stop()
    ours = ("JAVA", "SPARK", "PYSPARK")
    left = {name for name, value in os.environ.items() if name.startswith(ours) and begun.get(name) != value}
    classic = init(cores=1)
    print(json.dumps([*seen, sorted(left), is_connect(classic), classic.range(2).count()]))  # noqa: T201


if __name__ == "__main__":
    main()
