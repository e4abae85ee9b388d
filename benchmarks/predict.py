"""How fast is a frame scored against Spark's own predict_batch_udf, and files into files?

120,000 rows of 784 float32 in one Parquet file, the MLP, batches of 1,024, local[2], one thread a process.
Frames are consumed by Spark's noop sink: the predictions alone, and with all columns. From path to path,
the other side reads the same file, appends predict_batch_udf's column and writes Parquet.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _bench import ROWS, WIDTH, Report, arguments, mlp, rounds, seconds, spark_session, workplace, write_rows

from kindler import Columns

BATCH = 1024
PREDICT_ROWS = 2 * ROWS  # so that the second or less that a Spark job takes anyway does not decide


def main() -> None:
    given = arguments(__doc__, repeats=5)
    count = 4_096 if given.quick else PREDICT_ROWS
    report = Report("predict", f"rows/s of scoring {count:,} x {WIDTH} floats on 2 cores", quick=given.quick)
    with workplace() as folder:
        path = write_rows(folder / "rows.parquet", count)
        spark = spark_session(2)
        frame = spark.read.parquet(str(path))
        model = mlp()
        estimator, udf = _estimator(model), _udf(model)
        scored: dict[str, Callable[[], Any]] = {
            "predict_batch_udf": lambda: frame.withColumn("prediction", udf("features")),
            "inline": lambda: _predict(estimator, frame, "inline"),
            "direct": lambda: _predict(estimator, frame, "direct"),
        }
        ways: dict[str, Callable[[], float]] = {}
        for name, made in scored.items():
            ways[name] = lambda made=made: seconds(lambda: _drain(made().select("prediction")))
            ways[f"{name}, all columns"] = lambda made=made: seconds(lambda: _drain(made()))
        ways["predict_batch_udf, to files"] = lambda: _to_files(
            folder / "theirs", lambda out: scored["predict_batch_udf"]().write.parquet(str(out))
        )
        ways["path to path"] = lambda: _to_files(
            folder / "ours",
            lambda out: estimator.predict(
                str(path), BATCH, feature_cols="features", output_path=str(out), verbose=0
            ),
        )
        spent = rounds(ways, repeats=given.repeats, warm_up=not given.quick)
    speed = {name: [count / s for s in values] for name, values in spent.items()}
    for name, values in speed.items():
        report.figure(name, values, "rows/s")
    udf_alone, udf_all = speed["predict_batch_udf"], speed["predict_batch_udf, all columns"]
    report.ratio("inline / predict_batch_udf", speed["inline"], udf_alone, at_least=1.3)
    report.ratio("direct / predict_batch_udf", speed["direct"], udf_alone, at_least=3.0)
    report.ratio("inline, all columns", speed["inline, all columns"], udf_all)
    report.ratio("direct, all columns", speed["direct, all columns"], udf_all)
    report.ratio("path to path", speed["path to path"], speed["predict_batch_udf, to files"], at_least=3.0)
    report.finish(rows=count, batch_size=BATCH)


def _estimator(model: Any) -> Any:
    from kindler import Estimator
    from kindler.config import RunSettings

    return Estimator.from_torch(model=model, workers=2, settings=RunSettings(threads=1))


def _predict(estimator: Any, frame: Any, ingest: str) -> Any:
    return estimator.predict(
        frame,
        BATCH,
        feature_cols="features",
        columns=Columns(shapes={"features": (WIDTH,)}, ingest=ingest),
        verbose=0,
    )


def _udf(model: Any) -> Any:
    import torch
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    weights = file.getvalue()

    def make() -> Callable[[Any], Any]:
        import torch

        torch.set_num_threads(1)
        loaded = mlp()
        loaded.load_state_dict(torch.load(io.BytesIO(weights), weights_only=True))
        loaded.eval()

        def predict(rows: Any) -> Any:
            with torch.inference_mode():
                return loaded(torch.from_numpy(rows)).numpy()

        return predict

    return predict_batch_udf(
        make, return_type=ArrayType(FloatType()), batch_size=BATCH, input_tensor_shapes=[[WIDTH]]
    )


def _drain(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _to_files(folder: Path, write: Callable[[Path], Any]) -> float:
    spent = seconds(lambda: write(folder))
    shutil.rmtree(folder)
    return spent


if __name__ == "__main__":
    main()
