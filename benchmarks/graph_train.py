"""How fast does a TensorFlow graph train in workers, against a plain loop of `sess.run(train_op, feed_dict)`?

A LeNet on 28 x 28 images, and the MLP 784-64-10 whose steps are so short that what surrounds them shows.
Adam, one thread a process. Rows per second of each epoch but the first, the median of them. The plain loop
feeds slices of arrays in memory, and fetches the loss with each step, as Kindler does.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from statistics import median
from typing import Any

from _bench import CLASSES, WIDTH, Report, arguments, rounds

BATCH = 256
SKIPPED = 1  # the first epoch warms up
ROWS = {"lenet": 10_240, "mlp": 61_440}


def main() -> None:
    given = arguments(__doc__, repeats=3)
    epochs = 3 if given.quick else 6
    report = Report("graph_train", f"rows/s of training, batch {BATCH}, 1 thread each", quick=given.quick)
    for kind, count in ROWS.items():
        rows = 1_024 if given.quick else count
        measured = rounds(
            {
                "sess.run": lambda kind=kind, rows=rows: plain(kind, rows, epochs),
                "1 worker": lambda kind=kind, rows=rows: kindler(kind, rows, epochs, workers=1),
                "2 workers": lambda kind=kind, rows=rows: kindler(kind, rows, epochs, workers=2),
            },
            repeats=given.repeats,
            warm_up=False,
        )
        for way, values in measured.items():
            report.figure(f"{kind}: {way}", values, "rows/s")
        one = measured["1 worker"]
        report.ratio(f"{kind}: 1 worker / sess.run", one, measured["sess.run"], at_least=0.95)
        report.ratio(f"{kind}: 2 workers / 1 worker", measured["2 workers"], one)
    report.finish(epochs=epochs, batch_size=BATCH)


def kindler(kind: str, count: int, epochs: int, *, workers: int) -> float:
    """Steady rows/s of an Estimator on the local engine."""
    import tensorflow.compat.v1 as tf

    from kindler import Estimator, RunSettings

    x, y = data(count)
    with tf.Graph().as_default():
        images, labels, loss = graph(kind)
        estimator = Estimator.from_graph(
            inputs=images,
            labels=labels,
            loss=loss,
            optimizer=tf.train.AdamOptimizer(),
            workers=workers,
            engine="local",
            settings=RunSettings(threads=1),
        )
    history = estimator.fit({"x": x, "y": y}, epochs=epochs, batch_size=BATCH, verbose=0)
    return median(history["rows_per_s"][SKIPPED:])


def plain(kind: str, count: int, epochs: int) -> float:
    """The same of a plain session in a fresh process."""
    spawn = multiprocessing.get_context("spawn")
    found = spawn.Queue()
    child = spawn.Process(target=_plain, args=(kind, count, epochs, found))
    child.start()
    seconds = found.get(timeout=900)
    child.join(60)
    return count / median(seconds[SKIPPED:])


def _plain(kind: str, count: int, epochs: int, found: Any) -> None:
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", OMP_NUM_THREADS="1")
    import tensorflow.compat.v1 as tf

    x, y = data(count)
    config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    times: list[float] = []
    with tf.Graph().as_default(), tf.Session(config=config) as sess:
        images, labels, loss = graph(kind)
        train_op = tf.train.AdamOptimizer().minimize(loss)
        sess.run(tf.global_variables_initializer())
        for _ in range(epochs):
            began = time.perf_counter()
            for start in range(0, count, BATCH):
                part = slice(start, start + BATCH)
                sess.run([train_op, loss], feed_dict={images: x[part], labels: y[part]})
            times.append(time.perf_counter() - began)
    found.put(times)


def graph(kind: str) -> tuple[Any, Any, Any]:
    """Placeholders for images and labels, and the loss."""
    import tensorflow.compat.v1 as tf

    images = tf.placeholder(tf.float32, (None, WIDTH), name="images")
    labels = tf.placeholder(tf.int64, (None,), name="labels")
    hidden = images
    if kind == "lenet":
        hidden = tf.reshape(images, (-1, 28, 28, 1))
        for number, width in enumerate((32, 64)):
            kernel = tf.get_variable(f"conv{number}", (5, 5, hidden.shape[-1], width))
            hidden = tf.nn.relu(tf.nn.conv2d(hidden, kernel, padding="SAME"))
            hidden = tf.nn.max_pool2d(hidden, 2, 2, padding="VALID")
        hidden = tf.reshape(hidden, (-1, 7 * 7 * 64))
    hidden = tf.nn.relu(_dense(hidden, 64, "hidden"))
    loss = tf.losses.sparse_softmax_cross_entropy(labels, _dense(hidden, CLASSES, "out"))
    return images, labels, loss


def _dense(x: Any, width: int, name: str) -> Any:
    import tensorflow.compat.v1 as tf

    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", (int(x.shape[1]), width))
        bias = tf.get_variable("bias", (width,), initializer=tf.zeros_initializer())
    return tf.matmul(x, kernel) + bias


def data(count: int) -> Any:
    """Random images and labels."""
    import numpy as np

    random = np.random.default_rng(0)
    return random.random((count, WIDTH), dtype=np.float32), random.integers(0, CLASSES, count)


if __name__ == "__main__":
    main()
