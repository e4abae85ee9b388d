"""The table of everything that can be stored: kinds of datasets, and those of models. Loads no framework."""

from __future__ import annotations

from kindler.models.registry import MODEL_KINDS, Kinds, Row

_DATASETS = ("datasets",)

KINDS = Kinds(
    [
        Row(
            "parquet",
            "kindler.shelves.datasets.parquet:ParquetHandler",
            _DATASETS,
            loaded=("pandas", "pyarrow", "pyspark"),
            suffixes=(".parquet",),
        ),
        Row(
            "numpy",
            "kindler.shelves.datasets.numpy:NumpyHandler",
            _DATASETS,
            loaded=("numpy",),
            suffixes=(".npy",),
        ),
        Row(
            "tfrecord",
            "kindler.shelves.datasets.tfrecord:TfrecordHandler",
            _DATASETS,
            loaded=("tensorflow",),
            suffixes=(".tfrecord", ".tfrecords"),
        ),
        Row("arrays", "kindler.shelves.datasets.arrays:ArraysHandler", _DATASETS, loaded=("numpy",)),
        Row("json", "kindler.shelves.datasets.json:JsonHandler", _DATASETS, suffixes=(".json",)),
        *MODEL_KINDS.rows,
    ]
)
