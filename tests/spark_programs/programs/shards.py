"""Shards in a session of the mode given; prints what was seen as one line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import kindler
from kindler import SharedValue, XShards
from kindler.features import MinMaxScaler, StringIndexer


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


def ready(frame: Any) -> list[Any]:
    """Rows of a Spark frame, indexed and scaled."""
    indexed = StringIndexer("k").fit_transform(frame)
    scaled = MinMaxScaler(input_col=["n", "k"], output_col="v").fit_transform(indexed)
    return [list(row.v) for row in MinMaxScaler(0, 2, input_col="v").fit_transform(scaled).collect()]


def main(mode: str) -> None:
    kindler.init(cores=2, conf={"spark.api.mode": mode, "spark.sql.shuffle.partitions": "2"})
    shards = XShards.partition(np.arange(6), 3)
    frame = XShards.partition(pd.DataFrame({"k": list("ababab"), "n": range(6)}), 3)
    names = SharedValue({0: "zero", 2: "two", 4: "four"})
    groups = frame.group_by("k", {"n": "sum"}).to_pandas()
    Path("rows").mkdir()
    for i in range(2):
        Path(f"rows/{i}.csv").write_text(f"n,k\n{i},a\n{i + 2},b\n")
    seen = {
        "read": kindler.read_csv("rows").to_pandas()["n"].tolist(),
        "ready": ready(frame.to_spark_df().where("n < 3")),
        "engine": shards.engine,
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
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
