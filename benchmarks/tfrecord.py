"""How fast are TFRecord files read and written, against TensorFlow's own reader and writer?

Two kinds of records. Fixed: 784 float32 and a label, all records of one layout. Irregular: numbers of any
size, text, lists of different lengths, a value that is missing at times. Both sides run in processes of their
own that are bound to the same core. TensorFlow reads with TFRecordDataset and parse_example, in batches of
1,024, and writes with tf.train.Example and TFRecordWriter; "append" is the writer alone, with records that
are serialized already. Kindler reads into Arrow batches and writes an Arrow table. Both read what TensorFlow
wrote.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from _bench import WIDTH, Report, arguments, rounds, seconds, workplace

FIXED_ROWS, IRREGULAR_ROWS = 20_000, 50_000
SHAPES = ("fixed", "irregular")


def main() -> None:
    given = arguments(__doc__, repeats=7)
    scale = 20 if given.quick else 1
    counts = {"fixed": FIXED_ROWS // scale, "irregular": IRREGULAR_ROWS // scale}
    report = Report("tfrecord", "TFRecord files on one core, against TensorFlow", quick=given.quick)
    with workplace() as folder:
        sides = ("tensorflow", "kindler")
        with side("tensorflow", folder, counts) as tensorflow, side("kindler", folder, counts) as kindler:
            ask = {"tensorflow": tensorflow, "kindler": kindler}
            for shape in SHAPES:
                tensorflow(f"write {shape}")  # there must be files before the first read
            ways = {
                f"{task} {shape}, {name}": partial(ask[name], f"{task} {shape}")
                for task in ("read", "write")
                for shape in SHAPES
                for name in sides
            }
            ways |= {
                f"append {shape}, tensorflow": partial(tensorflow, f"append {shape}") for shape in SHAPES
            }
            measured = rounds(ways, repeats=given.repeats, warm_up=not given.quick)
        megabytes = {shape: path(folder, "tensorflow", shape).stat().st_size / 1e6 for shape in SHAPES}
    for name, values in measured.items():
        shape = name.split()[1].rstrip(",")
        report.figure(name, [megabytes[shape] / value for value in values], "MB/s")
    for task in ("read", "write"):
        for shape, wanted in (("fixed", 1.0), ("irregular", 0.3)):
            name = f"{task} {shape}"
            above, below = measured[f"{name}, tensorflow"], measured[f"{name}, kindler"]
            report.ratio(f"{name}, kindler / tensorflow", above, below, at_least=wanted)
    for shape in SHAPES:
        appended = measured[f"append {shape}, tensorflow"]
        report.ratio(f"write / append {shape}", appended, measured[f"write {shape}, kindler"])
    report.finish(rows=counts, megabytes=megabytes)


@contextmanager
def side(name: str, folder: Path, counts: dict[str, int]) -> Iterator[Callable[[str], float]]:
    """A process that does what it is asked and says how long it took."""
    core = str(min(os.sched_getaffinity(0)))
    command = [sys.executable, __file__, "--serve", name, str(folder), core, *map(str, counts.values())]
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def ask(task: str) -> float:
            child.stdin.write(task + "\n")
            child.stdin.flush()
            return float(child.stdout.readline())

        try:
            yield ask
        finally:
            child.stdin.close()


def serve(name: str, folder: Path, core: int, fixed: int, irregular: int) -> None:
    """In the child: answer every line of the input."""
    os.sched_setaffinity(0, {core})
    tables = {"fixed": fixed_table(fixed), "irregular": irregular_table(irregular)}
    tasks = _tensorflow(folder, tables) if name == "tensorflow" else _kindler(folder, tables)
    for line in sys.stdin:
        task, shape = line.split()
        print(tasks[task](shape), flush=True)


def path(folder: Path, name: str, shape: str) -> Path:
    return folder / f"{name}-{shape}.tfrecord"


def fixed_table(rows: int) -> Any:
    import numpy as np
    import pyarrow as pa

    random = np.random.default_rng(0)
    pixels = pa.FixedSizeListArray.from_arrays(pa.array(random.random(rows * WIDTH, dtype=np.float32)), WIDTH)
    return pa.table({"features": pixels, "label": random.integers(0, 10, rows)})


def irregular_table(rows: int) -> Any:
    import numpy as np
    import pyarrow as pa

    random = np.random.default_rng(1)
    words = np.array(["spark", "of", "a", "kindled", "fire", "Feuer", "été", "long" * 10])

    def lists(values: Any, most: int) -> Any:
        offsets = np.concatenate(([0], np.cumsum(random.integers(0, most, rows))))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values(int(offsets[-1]))))

    amount = random.random(rows, dtype=np.float32)
    return pa.table(
        {
            "id": random.integers(-(1 << 40), 1 << 40, rows),
            "clicks": (random.exponential(300, rows)).astype(np.int64),
            "amount": pa.array(amount, mask=random.random(rows) < 0.1),
            "text": [" ".join(random.choice(words, n)) for n in random.integers(1, 12, rows)],
            "history": lists(lambda n: random.integers(0, 50_000, n), 20),
            "scores": lists(lambda n: random.random(n, dtype=np.float32), 30),
        }
    )


def _kindler(folder: Path, tables: dict[str, Any]) -> dict[str, Callable[[str], float]]:
    from kindler import tfrecord

    def read(shape: str) -> None:
        file = path(folder, "tensorflow", shape)
        rows = sum(batch.num_rows for batch in tfrecord.iter_batches(file, schema=tables[shape].schema))
        assert rows == tables[shape].num_rows

    def write(shape: str) -> None:
        tfrecord.write(tables[shape], path(folder, "kindler", shape), overwrite=True)

    return {
        "read": lambda shape: seconds(partial(read, shape)),
        "write": lambda shape: seconds(partial(write, shape)),
    }


def _tensorflow(folder: Path, tables: dict[str, Any]) -> dict[str, Callable[[str], float]]:
    import tensorflow as tf

    number, text = tf.io.FixedLenFeature([], tf.int64), tf.io.FixedLenFeature([], tf.string)
    features = {
        "fixed": {"features": tf.io.FixedLenFeature([WIDTH], tf.float32), "label": number},
        "irregular": {
            "id": number,
            "clicks": number,
            "amount": tf.io.FixedLenFeature([], tf.float32, default_value=float("nan")),
            "text": text,
            "history": tf.io.RaggedFeature(tf.int64),
            "scores": tf.io.RaggedFeature(tf.float32),
        },
    }
    makers = {
        "int": lambda values: tf.train.Feature(int64_list=tf.train.Int64List(value=values)),
        "flo": lambda values: tf.train.Feature(float_list=tf.train.FloatList(value=values)),
        "str": lambda values: tf.train.Feature(
            bytes_list=tf.train.BytesList(value=[v.encode() for v in values])
        ),
    }

    def read(shape: str) -> None:
        data = tf.data.TFRecordDataset(str(path(folder, "tensorflow", shape))).batch(1024)
        parsed = data.map(lambda records: tf.io.parse_example(records, features[shape]))
        rows = sum(int(batch["label" if shape == "fixed" else "id"].shape[0]) for batch in parsed)
        assert rows == tables[shape].num_rows

    def write(shape: str) -> None:
        table = tables[shape]
        leaves = [str(getattr(field.type, "value_type", field.type))[:3] for field in table.schema]
        with tf.io.TFRecordWriter(str(path(folder, "tensorflow", shape))) as writer:
            for batch in table.to_batches(max_chunksize=1024):
                columns = [_lists(column) for column in batch.columns]
                for row in zip(*columns, strict=True):
                    cells = zip(batch.schema.names, leaves, row, strict=True)
                    named = {name: makers[leaf](values) for name, leaf, values in cells if values is not None}
                    example = tf.train.Example(features=tf.train.Features(feature=named))
                    writer.write(example.SerializeToString())

    def append(shape: str) -> None:
        with tf.io.TFRecordWriter(str(folder / "appended.tfrecord")) as writer:
            for record in serialized[shape]:
                writer.write(record)

    serialized: dict[str, list[bytes]] = {}

    def append_prepared(shape: str) -> float:
        if shape not in serialized:
            records = tf.data.TFRecordDataset(str(path(folder, "tensorflow", shape)))
            serialized[shape] = [record.numpy() for record in records]
        return seconds(partial(append, shape))

    return {
        "read": lambda shape: seconds(partial(read, shape)),
        "write": lambda shape: seconds(partial(write, shape)),
        "append": append_prepared,
    }


def _lists(column: Any) -> list[Any]:
    """Each cell as the list that a Feature takes."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):
        # Python's floats: a FloatList takes them four times as fast as numpy's.
        return column.flatten().to_numpy().reshape(len(column), -1).tolist()
    cells = column.to_pylist()
    return cells if pa.types.is_list(column.type) else [None if cell is None else [cell] for cell in cells]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
    else:
        main()
