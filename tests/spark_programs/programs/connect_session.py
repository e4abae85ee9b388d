"""The Connect session that runs is used and ended, and a classic one follows; prints what was seen as JSON.

It comes last of the programs that share a process, in which `kindler.stop` does nothing until then.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import kindler


def is_connect(spark: Any) -> bool:
    return "connect" in type(spark).__module__


def main() -> None:
    begun = dict(
        part.split("=", 1) for part in Path("/proc/self/environ").read_text().split("\0") if "=" in part
    )
    vars(kindler).pop("stop")  # so that it is looked up again
    spark = kindler.init()
    again = kindler.init(conf={"spark.sql.shuffle.partitions": 7})
    seen = [is_connect(spark), again is spark, spark.conf.get("spark.sql.shuffle.partitions")]
    seen.append(spark.range(5).count())
    kindler.stop()
    ours = ("JAVA", "SPARK", "PYSPARK")
    left = {name for name, value in os.environ.items() if name.startswith(ours) and begun.get(name) != value}
    classic = kindler.init(cores=1)
    print(json.dumps([*seen, sorted(left), is_connect(classic), classic.range(2).count()]))  # noqa: T201


if __name__ == "__main__":
    main()
