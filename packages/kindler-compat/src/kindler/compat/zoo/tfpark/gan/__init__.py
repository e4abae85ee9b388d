"""`GANEstimator`: a generator and a discriminator, trained in turns."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow.compat.v1 as tf

from kindler.compat.bigdl.optim.triggers import Trigger
from kindler.compat.zoo.tfpark.estimator import write_checkpoint
from kindler.compat.zoo.tfpark.tf_dataset import TFDataset
from kindler.compat.zoo.tfpark.training import Since, graph_estimator
from kindler.errors import ConfigError
from kindler.train.triggers import Progress

__all__ = ["GANEstimator"]

_GENERATOR, _DISCRIMINATOR = "Generator", "Discriminator"


class GANEstimator:
    """Trains two networks against each other.

    Of every `discriminator_steps + generator_steps` steps, the first ones train the discriminator, the
    others the generator; the network whose turn it is not, and its optimizer, do not change.
    """

    def __init__(
        self,
        generator_fn: Callable[..., Any],
        discriminator_fn: Callable[..., Any],
        generator_loss_fn: Callable[..., Any],
        discriminator_loss_fn: Callable[..., Any],
        generator_optimizer: Any,
        discriminator_optimizer: Any,
        generator_steps: int = 1,
        discriminator_steps: int = 1,
        model_dir: str | None = None,
        session_config: Any = None,
    ) -> None:
        for name, optimizer in (
            ("generator_optimizer", generator_optimizer),
            ("discriminator_optimizer", discriminator_optimizer),
        ):
            if not isinstance(optimizer, tf.train.Optimizer):
                raise ConfigError(
                    f"{name} must be a tf.train.Optimizer; received {type(optimizer).__qualname__}."
                )
        if generator_steps < 1 or discriminator_steps < 1:
            raise ConfigError("generator_steps and discriminator_steps must be at least 1.")
        self._functions = generator_fn, discriminator_fn, generator_loss_fn, discriminator_loss_fn
        self._optimizers = generator_optimizer, discriminator_optimizer
        self._steps = generator_steps, discriminator_steps
        self._session_config = session_config
        if model_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="kindler-gan-")
            model_dir = self._temporary.name
        self.model_dir = model_dir

    def train(self, input_fn: Callable[[], Any], end_trigger: Trigger) -> GANEstimator:
        if not isinstance(end_trigger, Trigger):
            raise ConfigError(
                f"end_trigger must be a trigger such as MaxIteration(1000); received {end_trigger!r}."
            )
        with tf.Graph().as_default() as graph:
            counter = tf.train.get_or_create_global_step(graph)
            dataset = input_fn()
            if not isinstance(dataset, TFDataset) or not dataset.labels:
                raise ConfigError(
                    "input_fn must return a TFDataset of pairs: the generator's inputs, and real data."
                )
            dataset.renew()
            dataset.require_training("used for training")
            turns = self._built(dataset, counter)
            with tf.Session(graph=graph) as sess:
                sess.run(tf.global_variables_initializer())
                made = graph_estimator(
                    inputs=dataset.fed_features,
                    labels=dataset.fed_labels,
                    loss=turns.loss,
                    optimizer=turns,
                    sess=sess,
                    global_step=counter,
                    session_config=self._session_config,
                )
                newest = tf.train.latest_checkpoint(self.model_dir)
                if newest is not None:
                    tf.train.Saver().restore(sess, newest)
                before = int(sess.run(counter))
                trigger = Since(end_trigger, 0, before)
                if before and trigger(Progress(epoch=1, step=0)):
                    return self
                made.fit_dataset(dataset, end_trigger=trigger)
                write_checkpoint(sess, self.model_dir, counter)
        return self

    def _built(self, dataset: TFDataset, counter: Any) -> _Turns:
        generator, discriminator, generator_loss, discriminator_loss = self._functions
        noise, real = dataset.feature_tensors, dataset.label_tensors

        def call(function: Callable[..., Any], *arguments: Any) -> Any:
            parameters = inspect.signature(function).parameters
            counted = {"counter": counter} if "counter" in parameters else {}
            taken = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values())
            several = any(p.kind == p.VAR_POSITIONAL for p in parameters.values())
            return function(*(arguments if several else arguments[: taken - len(counted)]), **counted)

        with tf.variable_scope(_GENERATOR):
            made = call(generator, noise)
        with tf.variable_scope(_DISCRIMINATOR):
            of_made = call(discriminator, made, noise)
        with tf.variable_scope(_DISCRIMINATOR, reuse=True):
            of_real = call(discriminator, real, noise)
        with tf.name_scope("Generator_loss"):
            loss_of_generator = call(generator_loss, of_made)
        with tf.name_scope("Discriminator_loss"):
            loss_of_discriminator = call(discriminator_loss, of_real, of_made)
        return _Turns(counter, self._steps, self._optimizers, (loss_of_generator, loss_of_discriminator))


class _Turns(tf.train.Optimizer):  # type: ignore[misc]
    """Two optimizers that take turns, each with the variables and the loss of its own network."""

    def __init__(self, counter: Any, steps: Any, optimizers: Any, losses: Any) -> None:
        super().__init__(use_locking=False, name="Turns")
        generator_steps, discriminator_steps = steps
        turn = tf.floormod(counter, generator_steps + discriminator_steps)
        self._judges = tf.less(turn, tf.cast(discriminator_steps, turn.dtype))
        self._optimizers, self._losses = optimizers, losses
        self.loss = tf.where(self._judges, losses[1], losses[0])

    def compute_gradients(self, loss: Any, var_list: Any = None, **options: Any) -> list[tuple[Any, Any]]:
        """The gradients of the network whose turn it is, and zeros for the other one."""
        pairs = []
        for scope, optimizer, own, active in zip(
            (_GENERATOR, _DISCRIMINATOR), self._optimizers, self._losses, (False, True), strict=True
        ):
            variables = tf.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES, scope=f"{scope}/")
            for gradient, variable in optimizer.compute_gradients(own, var_list=variables):
                if gradient is None:
                    continue
                dense = tf.convert_to_tensor(gradient)
                zeros = tf.zeros_like(dense)
                mine = self._judges if active else tf.logical_not(self._judges)
                pairs.append((tf.where(tf.fill(tf.shape(dense), mine), dense, zeros), variable))
        return pairs

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
    ) -> Any:
        pairs = list(grads_and_vars)
        parts = [
            [(g, v) for g, v in pairs if v.op.name.startswith(f"{scope}/")]
            for scope in (_GENERATOR, _DISCRIMINATOR)
        ]
        for optimizer, part in zip(self._optimizers, parts, strict=True):
            _innermost(optimizer)._create_slots([variable for _, variable in part])  # not within the branch

        def applied(number: int) -> Callable[[], Any]:
            def branch() -> Any:
                with tf.control_dependencies([self._optimizers[number].apply_gradients(parts[number])]):
                    return tf.constant(number)

            return branch

        done = tf.cond(self._judges, applied(1), applied(0))
        with tf.control_dependencies([done]):
            return tf.assign_add(global_step, tf.ones_like(global_step)).op


def _innermost(optimizer: Any) -> Any:
    return optimizer._optimizer if type(optimizer).__name__ == "ZooOptimizer" else optimizer
