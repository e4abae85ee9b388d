"""BigDL's `Optimizer` on arrays: steps against formulas of numpy, files to go on from, clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler.compat.bigdl.nn.criterion import *
from kindler.compat.bigdl.nn.layer import *
from kindler.compat.bigdl.optim.optimizer import *
from kindler.compat.zoo.orca.data import XShards
from kindler.compat.zoo.orca.learn.bigdl import Estimator
from kindler.errors import ConfigError

X = np.random.default_rng(0).normal(size=(12, 2)).astype("float32")
Y = (X @ np.array([1.0, -2.0]) + 0.3).astype("float32")


def trained(model: Any, until: Any, method: Any, **calls: tuple[Any, ...]) -> Any:
    """The optimizer after a run; a batch is all rows, so that their order does not matter."""
    made = Optimizer.create(
        model, (X, Y), MSECriterion(), end_trigger=until, batch_size=12, optim_method=method
    )
    for name, arguments in calls.items():
        getattr(made, name)(*arguments)
    assert made.optimize() is model
    return made


def adam(weights: list[Any], first: int, last: int, kept: dict[int, Any], limit: float = np.inf) -> list[Any]:
    """Weights after steps `first` to `last` of Adam with the rate 0.1 / (1 + 0.5 * steps made)."""
    w, b = (part.astype("float64") for part in weights)
    for number in range(first, last + 1):
        error = X @ w.T + b - Y[:, None]
        for place, gradient in enumerate((2 * error.T @ X / 12, 2 * error.mean(0))):
            g = np.clip(gradient, -limit, limit)
            m, v = kept.get(place, (0.0, 0.0))
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            kept[place] = m, v
            rate = 0.1 / (1 + 0.5 * (number - 1)) * np.sqrt(1 - 0.999**number) / (1 - 0.9**number)
            move = rate * m / (np.sqrt(v) + 1e-8)
            w, b = (w - move, b) if place == 0 else (w, b - move)
    return [w, b]


def same(model: Any, expected: list[Any]) -> None:
    for found, wanted in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_run_goes_on_where_the_last_one_ended_also_from_its_files(tmp_path: Path) -> None:
    model, method = Sequential().add(Linear(2, 1)), Adam(0.1, learningrate_decay=0.5)
    start, kept = model.get_weights(), {}
    summary, judged = TrainSummary(str(tmp_path), "run"), ValidationSummary(str(tmp_path), "run")
    made = trained(
        model, MaxEpoch(2), method,
        set_validation=(12, X, Y, EveryEpoch(), [MAE(), Loss()]), set_train_summary=(summary,),
        set_val_summary=(judged,), set_checkpoint=(EveryEpoch(), str(tmp_path / "files"), False),
    )  # fmt: skip
    after_two = adam(start, 1, 2, kept)
    same(model, after_two)
    assert method.state == {"epoch": 3, "neval": 3}

    made.set_end_when(MaxEpoch(4))
    made.optimize()
    after_four = adam(after_two, 3, 4, kept)
    same(model, after_four)
    assert [int(step) for step in summary.read_scalar("Loss")[:, 0]] == [1, 2, 3, 4]
    assert judged.read_scalar("MAE")[-1, 1] == pytest.approx(
        np.abs(X @ after_four[0].T + after_four[1] - Y[:, None]).mean(), rel=1e-4
    )
    made.optimize()  # MaxEpoch(4) is satisfied
    same(model, after_four)

    again = Model.load(str(tmp_path / "files" / "model.2"))
    same(again, after_two)
    loaded = OptimMethod.load(str(tmp_path / "files" / "optimMethod.2"))
    assert (loaded.state, loaded.learningRate()) == ({"epoch": 3, "neval": 3}, 0.1)
    trained(again, MaxIteration(4), loaded)
    same(again, after_four)
    other = Model.load(str(tmp_path / "files" / "model.2"))
    loaded = OptimMethod.load(str(tmp_path / "files" / "optimMethod.2"))
    orca = Estimator.from_bigdl(model=other, loss=MSECriterion(), optimizer=loaded)
    orca.fit(XShards.partition({"x": X, "y": Y}, num_shards=1, engine="local"), 2, batch_size=12)
    same(other, after_four)
    with pytest.raises(ConfigError, match="would start over here"):
        loaded.keras_optimizer(None)
    with pytest.raises(ConfigError, match="was used for a model with other parameters"):
        trained(Sequential().add(Linear(2, 3)).add(Linear(3, 1)), MaxEpoch(9), loaded)

    made.set_checkpoint(EveryEpoch(), str(tmp_path / "files"))  # replaces files
    made.set_model(new := Sequential().add(Linear(2, 1)))
    start = new.get_weights()
    made.set_end_when(MaxEpoch(1))
    assert made.optimize() is new
    same(new, adam(start, 1, 1, {}))


def test_gradients_are_clipped_until_that_is_taken_back() -> None:
    model, method = Sequential().add(Linear(2, 1)), Adam(0.1, learningrate_decay=0.5)
    start, kept = model.get_weights(), {}
    made = trained(model, MaxIteration(1), method, set_gradclip_const=(-0.2, 0.2))
    clipped = adam(start, 1, 1, kept, limit=0.2)
    same(model, clipped)
    made.disable_gradclip()
    made.set_end_when(MaxIteration(3))
    made.optimize()
    same(model, adam(clipped, 2, 3, kept))


def test_what_cannot_be_trained_is_said_before() -> None:
    model = Sequential().add(Linear(2, 1))
    for arguments, complaint in (
        (((X, Y), MSECriterion(), "MaxEpoch"), "end_trigger takes a trigger"),
        ((X, MSECriterion(), MaxEpoch(1)), "must be an RDD of Samples; received ndarray"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            Optimizer.create(model, *arguments)
    with pytest.raises(ConfigError, match="for the whole model; received {'a'"):
        Optimizer.create(model, (X, Y), MSECriterion(), optim_method={"a": SGD()})
    local = Optimizer.create(model, (X, Y), MSECriterion())
    assert isinstance(local, LocalOptimizer)
    with pytest.warns(UserWarning, match="validation is after each epoch"):
        local.set_validation(12, X, Y, SeveralIteration(3))


def test_a_method_is_read_as_it_was_written_without_running_code(tmp_path: Path) -> None:
    path = tmp_path / "method"
    schedule = SequentialSchedule(5).add(Warmup(0.1), 5).add(Poly(0.5, 10), 10)
    method = SGD(0.1, momentum=0.9, dampening=0.0, nesterov=True, leaningrate_schedule=schedule)
    method.save(str(path))
    with pytest.raises(ConfigError, match="exists"):
        method.save(str(path))
    method.save(str(path), True)
    found = OptimMethod.load(str(path))
    assert isinstance(found, SGD)
    assert [found.rate(step) for step in range(12)] == [method.rate(step) for step in range(12)]
    assert found.momentum() == method.value.momentum() == 0.9
    assert found.nesterov() is True

    class Mine(SGD):
        pass

    with pytest.raises(ConfigError, match="a Mine cannot be written"):
        Mine().save(str(tmp_path / "mine"))
    path.write_bytes(b"something else")
    with pytest.raises(ConfigError, match="is not an optimizer that `save`"):
        OptimMethod.load(str(path))


def test_a_learning_rate_of_0_leaves_weights_as_they_are() -> None:
    model = Sequential().add(Linear(2, 1))
    before = model.get_weights()
    trained(model, MaxEpoch(1), SGD(0.0))
    same(model, before)
    with pytest.raises(ConfigError, match="must be 0 or more; received -0.1"):
        SGD(-0.1)
    with pytest.raises(ConfigError, match="Ftrl divides by its learningrate"):
        Ftrl(0.0)
