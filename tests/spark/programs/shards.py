"""Shards in a session of the mode given; prints what was seen as one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pandas as pd

import kindler
from kindler import SharedValue, XShards


def fail(shard: Any) -> Any:
    if shard[0] == 2:
        raise KeyError("no such thing")
    return shard


def error_of(shards: XShards) -> list[Any]:
    try:
        shards.transform_shard(fail)
    except KeyError as exc:
        return [str(exc).splitlines()[0], exc.shard]  # type: ignore[attr-defined]
    return []


def main(mode: str) -> None:
    kindler.init(cores=2, conf={"spark.api.mode": mode, "spark.sql.shuffle.partitions": "2"})
    shards = XShards.partition(np.arange(6), 3)
    frame = XShards.partition(pd.DataFrame({"k": list("ababab"), "n": range(6)}), 3)
    names = SharedValue({0: "zero", 2: "two", 4: "four"})
    groups = frame.group_by("k", {"n": "sum"}).to_pandas()
    seen = {
        "home": shards.home,
        "doubled": [shard.tolist() for shard in shards.transform_shard(lambda s: s * 2).collect()],
        "shared": shards.transform_shard(lambda s, known: [known[int(s[0])]], names).collect(),
        "error": error_of(shards),
        "repartitioned": [shard.tolist() for shard in shards.repartition(2).collect()],
        "zipped": [a.tolist() for a, b in shards.zip(shards).collect() if (a == b).all()],
        "sorted": frame.sort_values("n", False).to_pandas()["n"].tolist(),
        "groups": groups.to_numpy().tolist(),
        "merged": frame.merge(frame, on=["k", "n"]).to_pandas()["n"].tolist(),
        "frame": [row.n for row in XShards.from_spark_df(frame.to_spark_df()).to_spark_df().collect()],
    }
    kindler.stop()
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
