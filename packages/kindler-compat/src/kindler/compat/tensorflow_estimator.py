"""`tf.estimator`, which TensorFlow took out in 2.16: importing this module puts it back into `tensorflow`.

Hooks are those of `tf.compat.v1.train`. An `Estimator` trains in workers of Kindler's, as
`kindler.Estimator.from_model_fn` does, so it is for a driver or a program of its own; within a cluster of
several nodes, each of which runs the whole program, it is refused. What is not here is refused by its name.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from kindler import Estimator as _Kindler
from kindler.compat.estimators import EstimatorSpec, ModeKeys, from_model_fn
from kindler.errors import ConfigError

__all__ = ["EstimatorSpec", "EvalSpec", "ModeKeys", "RunConfig", "TrainSpec", "train_and_evaluate"]

_HOOK = re.compile(r"SessionRun(Args|Context|Values)|SecondOrStepTimer|\w+(Hook|Listener)|NanLoss\w+Error")
_SINGLE = ("chief", "master", "worker")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of an estimator. Checkpoints are written at the end of each training."""

    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = None
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: int | None = None
    keep_checkpoint_max: int | None = None
    log_step_count_steps: int | None = None
    session_config: Any = None
    train_distribute: Any = None
    eval_distribute: Any = None

    def __post_init__(self) -> None:
        if self.train_distribute is not None or self.eval_distribute is not None:
            raise ConfigError(
                "RunConfig: strategies of tf.distribute do not distribute estimators here.\n"
                "Hint: Estimator(..., workers=2) trains on two workers of Kindler."
            )


@dataclass(frozen=True)
class TrainSpec:
    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[Any] = ()
    saving_listeners: Sequence[Any] = ()


@dataclass(frozen=True)
class EvalSpec:
    """What to evaluate: so many batches of it, or all for None."""

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[Any] = ()
    exporters: Any = None
    start_delay_secs: int = 120
    throttle_secs: int = 600


class Estimator:
    """A model function, trained and evaluated as `kindler.Estimator.from_model_fn` does it."""

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | None = None,
        config: RunConfig | None = None,
        params: Any = None,
        warm_start_from: str | None = None,
        **options: Any,
    ) -> None:
        _check_alone()
        self.config = config or RunConfig()
        self.params = params
        self.model_dir = model_dir or self.config.model_dir
        if self.config.tf_random_seed is not None:
            options.setdefault("seed", self.config.tf_random_seed)
        self._core = from_model_fn(
            _Kindler,
            model_fn,
            model_dir=self.model_dir,
            params=params,
            config=self.config,
            warm_start_from=warm_start_from,
            **{"workers": 1, **options},
        )

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> Estimator:
        """Train `steps` steps, or until the global step is `max_steps`, or until a data set is at its end."""
        _refuse(hooks=hooks, saving_listeners=saving_listeners)
        if steps is not None and max_steps is not None:
            raise ConfigError("train: steps and max_steps were both passed; pass one of them.")
        if max_steps is not None:
            steps = max_steps - self._core.global_step
        if steps is None or steps > 0:
            self._core.train(_first(input_fn, steps), verbose=0)
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """The loss and the metrics over so many batches, or over all for None."""
        _refuse(hooks=hooks)
        return self._core.evaluate(_first(input_fn, steps), checkpoint_path=checkpoint_path, verbose=0)

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """What is predicted for each row; all at once where `yield_single_examples` is False."""
        _refuse(hooks=hooks)
        found = self._core.predict(_features(input_fn), predict_keys, checkpoint_path, verbose=0)
        if not yield_single_examples:
            yield found
        elif isinstance(found, Mapping):
            for values in zip(*found.values(), strict=True):
                yield dict(zip(found, values, strict=True))
        else:
            yield from np.asarray(found)


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any], list[Any]]:
    """Train until `max_steps`, then evaluate; gives the metrics, and no exports."""
    _refuse(exporters=eval_spec.exporters)
    estimator.train(
        train_spec.input_fn,
        train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=train_spec.saving_listeners,
    )
    return estimator.evaluate(eval_spec.input_fn, eval_spec.steps, eval_spec.hooks), []


def _first(input_fn: Callable[..., Any], steps: int | None) -> Callable[..., Any]:
    """The input function with so many batches of its data set, which may have no end."""

    @functools.wraps(input_fn)
    def made(*args: Any, **names: Any) -> Any:
        data = input_fn(*args, **names)
        if steps is None:
            return data
        if not isinstance(data, tf.data.Dataset):
            raise ConfigError(
                f"steps={steps} counts batches of a tf.data.Dataset; the input function returned"
                f" {type(data).__name__!r}."
            )
        return data.take(steps)

    return made


def _features(input_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The input function with the features of its data set as arrays, which is what can be scored."""

    @functools.wraps(input_fn)
    def made(*args: Any, **names: Any) -> Any:
        data = input_fn(*args, **names)
        if not isinstance(data, tf.data.Dataset):
            return data
        batches = [batch[0] if isinstance(batch, tuple) else batch for batch in data.as_numpy_iterator()]
        if batches and isinstance(batches[0], Mapping):
            return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        return np.concatenate(batches)

    return made


def _check_alone() -> None:
    cluster = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster", {})
    nodes = sum(len(cluster.get(role, ())) for role in _SINGLE)
    if nodes > 1:
        raise ConfigError(
            f"tf.estimator within a cluster: each of its {nodes} nodes would train a separate model.\n"
            f"Hint: train on the driver, with Estimator(..., workers={nodes}); or train a Keras model under"
            " MultiWorkerMirroredStrategy in the cluster."
        )


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise ConfigError(
                f"tf.estimator: {name} are not called here; received {value!r}.\n"
                "Hint: Kindler's callbacks, in kindler.Estimator.from_model_fn(...).train(callbacks=[...])."
            )


def __getattr__(name: str) -> Any:
    if _HOOK.fullmatch(name) and hasattr(tf.compat.v1.train, name):
        return getattr(tf.compat.v1.train, name)
    raise AttributeError(
        f"tf.estimator has no {name} here.\n"
        "Hint: there are Estimator, RunConfig, TrainSpec, EvalSpec, train_and_evaluate, EstimatorSpec,"
        " ModeKeys and hooks; models such as DNNClassifier are a few lines of Keras, for"
        " kindler.Estimator.from_keras."
    )


if not hasattr(tf, "estimator"):
    tf.estimator = tf.compat.v1.estimator = sys.modules[__name__]
