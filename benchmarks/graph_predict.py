"""How fast is a frame scored with a TensorFlow graph, against a session in each partition that reads rows?

Rows of 784 float32 in one Parquet file, the MLP 784-64-10, batches of 1,024, local[2], one thread a process.
The other side is what programs of TensorFlow 1 write by hand: `frame.rdd.mapPartitions`, which opens a
session over a frozen graph once per partition, stacks the values of rows into batches, and runs the session.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _bench import ROWS, WIDTH, Report, arguments, rounds, seconds, spark_session, workplace, write_rows
from graph_train import _dense

from kindler import Columns

BATCH = 1024


def main() -> None:
    given = arguments(__doc__, repeats=5)
    count = 4_096 if given.quick else ROWS
    report = Report("graph_predict", f"rows/s of scoring {count:,} x {WIDTH} floats", quick=given.quick)
    with workplace() as folder:
        path = write_rows(folder / "rows.parquet", count)
        spark = spark_session(2)
        frame = spark.read.parquet(str(path))
        estimator, frozen = _estimator()
        spent = rounds(
            {
                "session per partition": lambda: seconds(lambda: _by_hand(frame, frozen)),
                "kindler": lambda: seconds(lambda: _scored(estimator, frame)),
            },
            repeats=given.repeats,
            warm_up=not given.quick,
        )
    speed = {name: [count / s for s in values] for name, values in spent.items()}
    for name, values in speed.items():
        report.figure(name, values, "rows/s")
    report.ratio(
        "kindler / session per partition", speed["kindler"], speed["session per partition"], at_least=2.0
    )
    report.finish(rows=count, batch_size=BATCH)


def _estimator() -> tuple[Any, tuple[bytes, str, str]]:
    """An estimator of the graph, and the same graph with constants in the place of variables."""
    import tensorflow.compat.v1 as tf

    from kindler import Estimator, RunSettings

    with tf.Graph().as_default() as graph:
        images = tf.placeholder(tf.float32, (None, WIDTH), name="images")
        logits = _dense(tf.nn.relu(_dense(images, 64, "hidden")), 10, "out")
        estimator = Estimator.from_graph(
            inputs=images, outputs=logits, workers=2, settings=RunSettings(threads=1)
        )
        constants = tf.graph_util.convert_variables_to_constants(
            estimator.get_model(), graph.as_graph_def(), [logits.op.name]
        )
    return estimator, (constants.SerializeToString(), images.name, logits.name)


def _scored(estimator: Any, frame: Any) -> None:
    scored = estimator.predict(
        frame, BATCH, feature_cols="features", columns=Columns(shapes={"features": (WIDTH,)}), verbose=0
    )
    scored.select("prediction").write.format("noop").mode("overwrite").save()


def _by_hand(frame: Any, frozen: tuple[bytes, str, str]) -> None:
    def predict(rows: Iterator[Any]) -> Iterator[Any]:
        import numpy as np
        import tensorflow.compat.v1 as tf

        definition, images, logits = frozen
        graph = tf.Graph()
        with graph.as_default():
            tf.import_graph_def(tf.GraphDef.FromString(definition), name="")
        config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        with tf.Session(graph=graph, config=config) as sess:
            batch: list[Any] = []
            for row in rows:
                batch.append(row["features"])
                if len(batch) == BATCH:
                    yield from sess.run(logits, {images: np.array(batch, np.float32)}).tolist()
                    batch = []
            if batch:
                yield from sess.run(logits, {images: np.array(batch, np.float32)}).tolist()

    scored = frame.select("features").rdd.mapPartitions(predict)
    scored.foreachPartition(lambda rows: sum(1 for _ in rows))


if __name__ == "__main__":
    main()
