"""The table of everything that can be stored: kinds of datasets, and those of models. Loads no framework."""

from __future__ import annotations

from kindler.models.registry import MODEL_KINDS, Kinds, row

__all__ = ["KINDS"]

KINDS = Kinds(
    [
        row(
            "parquet",
            "shelves.datasets.parquet:ParquetHandler",
            "datasets",
            loaded=("pandas", "pyarrow", "pyspark"),
            suffixes=(".parquet",),
        ),
        row(
            "numpy", "shelves.datasets.numpy:NumpyHandler", "datasets", loaded=("numpy",), suffixes=(".npy",)
        ),
        row(
            "tfrecord",
            "shelves.datasets.tfrecord:TfrecordHandler",
            "datasets",
            loaded=("tensorflow",),
            suffixes=(".tfrecord", ".tfrecords"),
        ),
        row("arrays", "shelves.datasets.arrays:ArraysHandler", "datasets", loaded=("numpy",)),
        row("json", "shelves.datasets.json:JsonHandler", "datasets", suffixes=(".json",)),
        *MODEL_KINDS.rows,
    ]
)
