"""How fast are pandas rows a Spark DataFrame, and that one pandas again: by shards, and row by row?

5,000,000 rows of ten columns (integers, floats, a string), local[2]. There: until Spark's noop sink has read
every value. Back: from a cached DataFrame to one pandas DataFrame. Row by row is what `createDataFrame` and
`collect` do with tuples; it gets the same rows, but takes minutes and is measured once.
"""

from __future__ import annotations

from typing import Any

from _bench import Report, arguments, rounds, seconds, spark_session

ROWS = 5_000_000
FEW = 100
SHARDS = 8


def main() -> None:
    given = arguments(__doc__, repeats=3)
    count = 50_000 if given.quick else ROWS
    report = Report("shards", f"rows/s of {count:,} x 10 pandas values to Spark and back", quick=given.quick)
    spark = spark_session(2)
    frame = _frame(count)
    schema = ", ".join(f"{name} {_type(frame[name])}" for name in frame)
    whole = _cached(spark, frame, schema)
    _drain(_by_rows(spark, frame.head(count // FEW), schema))  # some rows are enough to warm this way up
    _collected(whole.limit(count // FEW))
    spent = rounds(
        {
            "by rows, there": lambda: seconds(lambda: _drain(_by_rows(spark, frame, schema))),
            "by rows, back": lambda: seconds(lambda: _collected(whole)),
        },
        repeats=1,
        warm_up=False,
    )
    spent |= rounds(
        {
            "by shards, there": lambda: seconds(lambda: _drain(_shards(frame).to_spark_df())),
            "by shards, back": lambda: seconds(lambda: _from_frame(whole).to_pandas()),
        },
        repeats=given.repeats,
        warm_up=not given.quick,
    )
    speed = {name: [count / s for s in values] for name, values in spent.items()}
    for name, values in speed.items():
        report.figure(name, values, "rows/s")
    for way in ("there", "back"):
        by_rows = speed[f"by rows, {way}"] * given.repeats
        report.ratio(f"shards / rows, {way}", speed[f"by shards, {way}"], by_rows, at_least=3.0)
    report.finish(rows=count, columns=10, shards=SHARDS)


def _frame(rows: int) -> Any:
    import numpy as np
    import pandas as pd

    random = np.random.default_rng(0)
    columns: dict[str, Any] = {f"f{i}": random.random(rows) for i in range(5)}
    columns |= {f"i{i}": random.integers(0, 1 << 40, rows) for i in range(4)}
    columns["s"] = np.array(["red", "green", "blue", "a longer name"], object)[random.integers(0, 4, rows)]
    return pd.DataFrame(columns)


def _type(column: Any) -> str:
    return {"f": "double", "i": "bigint", "O": "string"}[column.dtype.kind]


def _cached(spark: Any, pandas: Any, schema: str) -> Any:
    frame = spark.createDataFrame(pandas, schema).repartition(SHARDS).cache()
    frame.count()
    return frame


def _shards(pandas: Any) -> Any:
    from kindler import XShards

    return XShards.partition(pandas, SHARDS, engine="spark")


def _from_frame(frame: Any) -> Any:
    from kindler import XShards

    return XShards.from_spark_df(frame)


def _by_rows(spark: Any, pandas: Any, schema: str) -> Any:
    return spark.createDataFrame(list(pandas.itertuples(index=False, name=None)), schema)


def _collected(frame: Any) -> Any:
    import pandas as pd

    return pd.DataFrame.from_records(frame.collect(), columns=frame.columns)


def _drain(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


if __name__ == "__main__":
    main()
