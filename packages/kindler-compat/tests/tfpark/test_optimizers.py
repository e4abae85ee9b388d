"""BigDL's optimizers and schedules against their formulas, in a session of this process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kindler.compat import tensorflow as tf
from kindler.compat.bigdl.optim.optimizer import (
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    Exponential,
    Ftrl,
    MultiStep,
    NaturalExp,
    Poly,
    RMSprop,
    SequentialSchedule,
    Step,
    Warmup,
)
from kindler.compat.bigdl.optim.rules_tf import graph_optimizer
from kindler.errors import ConfigError

torch = pytest.importorskip("torch")

START = np.array([1.0, -2.0, 0.5], np.float32)
TARGET = np.array([0.3, 0.1, -0.7], np.float32)


def trained(method: Any, steps: int = 6) -> np.ndarray[Any, Any]:
    """A few steps on the squared distance from TARGET."""
    with tf.Graph().as_default(), tf.Session() as sess:
        x = tf.Variable(START)
        step = graph_optimizer(method).minimize(tf.reduce_sum(tf.square(x - TARGET)))
        sess.run(tf.global_variables_initializer())
        for _ in range(steps):
            sess.run(step)
        value: np.ndarray[Any, Any] = sess.run(x)
        return value


def by_torch(make: Any, steps: int = 6) -> np.ndarray[Any, Any]:
    x = torch.nn.Parameter(torch.tensor(START))
    optimizer = make([x])
    for _ in range(steps):
        optimizer.zero_grad()
        ((x - torch.tensor(TARGET)) ** 2).sum().backward()
        optimizer.step()
    return x.detach().numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("method", "reference"),
    [
        (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
        (SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.9)),
        (
            SGD(0.1, momentum=0.9, dampening=0, nesterov=True, weightdecay=0.01),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        ),
        (Adam(0.1), lambda p: torch.optim.Adam(p, 0.1)),
        (Adagrad(0.1), lambda p: torch.optim.Adagrad(p, 0.1)),
        (Adadelta(0.9, 1e-6), lambda p: torch.optim.Adadelta(p, 1.0, rho=0.9, eps=1e-6)),
        (Adamax(0.1), lambda p: torch.optim.Adamax(p, 0.1, eps=1e-38)),
        (RMSprop(0.1), lambda p: torch.optim.RMSprop(p, 0.1, alpha=0.99)),
        (SGD(0.1, leaningrate_schedule=Step(2, 0.5)), lambda p: torch.optim.SGD(p, 0.1)),
    ],
    ids=lambda value: repr(value) if hasattr(value, "rate") else "",
)
def test_steps_are_those_of_the_same_optimizer_in_torch(method: Any, reference: Any) -> None:
    def made(parameters: Any) -> Any:
        optimizer = reference(parameters)
        if type(method.schedule) is Step:
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    np.testing.assert_allclose(trained(method), by_torch(made), rtol=2e-5, atol=1e-6)


def test_ftrl_makes_the_steps_of_tensorflow() -> None:
    with tf.Graph().as_default(), tf.Session() as sess:
        x = tf.Variable(START)
        optimizer = tf.train.FtrlOptimizer(
            0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.02
        )
        step = optimizer.minimize(tf.reduce_sum(tf.square(x - TARGET)))
        sess.run(tf.global_variables_initializer())
        for _ in range(6):
            sess.run(step)
        expected = sess.run(x)

    np.testing.assert_allclose(trained(Ftrl(0.1, -0.5, 0.1, 0.01, 0.02)), expected, rtol=1e-5)


def test_lbfgs_finds_the_minimum_of_a_quadratic_function_within_a_few_steps() -> None:
    np.testing.assert_allclose(trained(LBFGS(ncorrection=5), steps=12), TARGET, atol=1e-4)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        (Poly(0.5, 10), 4, 0.1 * math.sqrt(0.6)),
        (Poly(0.5, 10), 11, 0.0),
        (Step(3, 0.5), 7, 0.1 * 0.25),
        (MultiStep([2, 5], 0.1), 4, 0.1 * 0.1),
        (MultiStep([2, 5], 0.1), 5, 0.1 * 0.01),
        (Exponential(10, 0.5), 5, 0.1 * 0.5**0.5),
        (Exponential(10, 0.5, stair_case=True), 15, 0.1 * 0.5),
        (NaturalExp(10, 0.3), 25, 0.1 * math.exp(-0.6)),
        (Warmup(0.01), 5, 0.15),
        (SequentialSchedule(5).add(Warmup(0.02), 5).add(Step(2, 0.5), 100), 5, 0.2),
        (SequentialSchedule(5).add(Warmup(0.02), 5).add(Step(2, 0.5), 100), 8, 0.2 * 0.5),
    ],
)
def test_a_schedule_gives_the_rate_of_its_formula_here_and_in_a_graph(
    schedule: Any, step: int, rate: float
) -> None:
    with tf.Graph().as_default(), tf.Session() as sess:
        inside = sess.run(schedule.rate(tf, 0.1, 0.0, tf.constant(float(step))))

    assert SGD(0.1, leaningrate_schedule=schedule).rate(step) == pytest.approx(rate)
    assert inside == pytest.approx(rate, rel=1e-5)


def test_the_default_schedule_decays_with_the_number_of_steps() -> None:
    assert Adam(0.1, learningrate_decay=0.5).rate(2) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: SGD(0.1, nesterov=True), "nesterov=True requires a momentum"),
        (lambda: SGD(-1.0), "learningrate must be 0 or more"),
        (lambda: SGD(0.1, leaningrate_schedule=0.5), "the schedule must be one of"),  # type: ignore[arg-type]
        (lambda: Step(0, 0.1), "step_size must be a whole number"),
        (lambda: LBFGS(linesearch=max), "linesearch and linesearch_options must be None"),
        (lambda: SequentialSchedule(5).rate(np, 0.1, 0.0, 1.0), "has no schedules"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()
