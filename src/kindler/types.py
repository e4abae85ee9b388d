"""Types of the arguments of `Estimator`, for annotations and editors; using them imports no framework."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from kindler.errors import ConfigError

if TYPE_CHECKING:
    import datasets
    import keras
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    import ray.data
    import tensorflow as tf
    import tf_keras
    import torch
    from pyspark.sql import DataFrame
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    from kindler.data.tables import Table
    from kindler.train.callbacks import Callback, DriverCallback
    from kindler.xshards import XShards

__all__ = [
    "Callbacks",
    "CompileArguments",
    "Config",
    "Data",
    "Dtypes",
    "KerasModel",
    "Lora",
    "Sampling",
    "ScoringData",
    "Shapes",
    "TextTask",
    "TorchLoss",
    "TorchMetrics",
    "TorchModel",
    "TorchOptimizer",
    "TorchScheduler",
]

Config: TypeAlias = Mapping[str, Any]
"""The argument of creators."""

TorchModel: TypeAlias = "torch.nn.Module | Callable[..., torch.nn.Module]"
_TorchOptimizer: TypeAlias = "torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]"
TorchOptimizer: TypeAlias = "_TorchOptimizer | Mapping[str, _TorchOptimizer]"
_TorchScheduler: TypeAlias = "Callable[..., LRScheduler | ReduceLROnPlateau]"
TorchScheduler: TypeAlias = "_TorchScheduler | Mapping[str, _TorchScheduler]"
_TorchLoss: TypeAlias = "torch.nn.Module | Callable[..., Any]"
TorchLoss: TypeAlias = "_TorchLoss | Literal['model'] | Sequence[_TorchLoss] | Mapping[str, _TorchLoss]"
_TorchMetric: TypeAlias = "str | torch.nn.Module | Callable[..., Any]"
TorchMetrics: TypeAlias = "_TorchMetric | Sequence[_TorchMetric] | Mapping[str, _TorchMetric]"

TextTask: TypeAlias = Literal[
    "text-classification",
    "token-classification",
    "regression",
    "embedding",
    "text-generation",
    "text2text-generation",
]
"""What a model of `Estimator.from_huggingface` does with text."""
GENERATING: tuple[TextTask, ...] = ("text-generation", "text2text-generation")

KerasModel: TypeAlias = "keras.Model | tf_keras.Model | Callable[..., keras.Model | tf_keras.Model]"
CompileArguments: TypeAlias = "Mapping[str, Any] | Callable[..., Mapping[str, Any]]"

_Array: TypeAlias = "np.ndarray[Any, Any]"
_Path: TypeAlias = "str | PathLike[str]"
_Dataset: TypeAlias = "torch.utils.data.Dataset[Any] | datasets.Dataset | ray.data.Dataset"
_Local: TypeAlias = (
    "_Array | Mapping[str, Any] | tuple[Any, ...] | Sequence[_Array] | pd.DataFrame | pa.Table"
)
_Files: TypeAlias = "_Path | Table | Sequence[_Path | Table]"


class _ArrowStream(Protocol):
    """A table of another library, such as Polars or DuckDB."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


ScoringData: TypeAlias = "DataFrame | XShards | _Files | _Local | pa.RecordBatch | _Dataset | _ArrowStream"
"""What `predict` takes."""
Data: TypeAlias = "ScoringData | torch.utils.data.DataLoader[Any] | tf.data.Dataset | Callable[..., Any]"
"""What `fit` and `evaluate` take: also loaders, and functions that make them."""

Shapes: TypeAlias = "Mapping[str, int | Sequence[int]]"
Dtypes: TypeAlias = "Mapping[str, np.dtype[Any] | type | str]"
Callbacks: TypeAlias = "Sequence[Callback | DriverCallback | keras.callbacks.Callback]"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How `generate` chooses tokens: `generate(frame, sampling=Sampling(temperature=0.7))`.

    Attributes:
        max_new_tokens: Tokens after which an answer is cut. A decoder also ends at its last position.
        temperature: 0 always takes the likeliest token; 1 draws from the model's distribution.
        top_k: Draw from so many of the likeliest tokens. None does not limit them.
        top_p: Draw from the likeliest tokens that together have this probability.
        stop: Texts at which an answer ends; they are not part of it.
        schema: A JSON schema that every answer follows: a dict, JSON text or a model of pydantic.
            `{"type": "object"}` is any object. Answers are written as `json.dumps` does. Needs
            `kindler[structured]`.
        seed: Decides what is drawn, together with the prompt alone: neither partitions nor batches change it.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    stop: Sequence[str] = ()
    schema: Mapping[str, Any] | str | type | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        schema = _json_schema(self.schema)
        rules = {
            "max_new_tokens": (_whole(self.max_new_tokens, 1), "a whole number from 1"),
            "temperature": (_number(self.temperature) and 0 <= self.temperature < inf, "a number from 0"),
            "top_k": (self.top_k is None or _whole(self.top_k, 1), "a whole number from 1, or None"),
            "top_p": (_number(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1"),
            "stop": (
                not isinstance(self.stop, str) and all(isinstance(text, str) and text for text in self.stop),
                "a list of texts",
            ),
            "schema": (
                self.schema is None or (schema is not None and not self.stop),
                "a JSON schema, as a dict, JSON text or a model of pydantic, without stop texts",
            ),
            "seed": (isinstance(self.seed, int), "a whole number"),
        }
        _require(self, rules)
        object.__setattr__(self, "schema", schema)  # one form for all that send it


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters: `Estimator.from_huggingface(model, adapter=Lora(rank=8))`.

    Attributes:
        rank: The width of the two small matrices beside each adapted layer.
        alpha: Adapters are scaled by `alpha / rank`. None is twice the rank.
        dropout: The share of an adapter's inputs that training leaves out.
        target_modules: The names of the layers to adapt, such as `["q_proj", "v_proj"]`, a regular
            expression, or "all-linear". None takes peft's choice for the architecture.
        modules_to_save: Layers to train as a whole beside the adapters. Heads that classify always are.
        base_bits: 4 or 8 reads the base in so many bits with bitsandbytes, where that supports the device.
            None leaves it as it is.
    """

    rank: int = 8
    alpha: float | None = None
    dropout: float = 0.0
    target_modules: str | Sequence[str] | None = None
    modules_to_save: Sequence[str] = ()
    base_bits: Literal[4, 8] | None = None

    def __post_init__(self) -> None:
        def names(value: object) -> bool:
            return (
                isinstance(value, Sequence)
                and not isinstance(value, str)
                and all(isinstance(name, str) and name for name in value)
            )

        targets = self.target_modules
        rules = {
            "rank": (_whole(self.rank, 1), "a whole number from 1"),
            "alpha": (
                self.alpha is None or (_number(self.alpha) and 0 < self.alpha < inf),
                "above 0, or None",
            ),
            "dropout": (_number(self.dropout) and 0 <= self.dropout < 1, "from 0, and below 1"),
            "target_modules": (
                targets is None or ((names(targets) or isinstance(targets, str)) and len(targets) > 0),
                "names of layers, a regular expression, 'all-linear' or None",
            ),
            "modules_to_save": (names(self.modules_to_save), "a list of names of layers"),
            "base_bits": (
                self.base_bits is None or (_whole(self.base_bits, 4) and self.base_bits in (4, 8)),
                "4, 8 or None",
            ),
        }
        _require(self, rules)


def _json_schema(value: Any) -> str | None:
    """As JSON text; None if it is none."""
    made: Any = getattr(value, "model_json_schema", None)
    try:
        told = json.loads(value) if isinstance(value, str) else made() if callable(made) else value
        return json.dumps(told, allow_nan=False) if isinstance(told, Mapping) else None
    except (TypeError, ValueError):
        return None


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(made: object, rules: Mapping[str, tuple[bool, str]]) -> None:
    if wrong := [
        f"{type(made).__name__}({name}={getattr(made, name)!r}): must be {rule}."
        for name, (holds, rule) in rules.items()
        if not holds
    ]:
        raise ConfigError("\n".join(wrong))
