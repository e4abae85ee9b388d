"""BigDL's estimator on the local engine: steps against formulas of numpy, labels, files, summaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kindler.compat.bigdl.nn.criterion import *
from kindler.compat.bigdl.nn.layer import *
from kindler.compat.bigdl.optim.optimizer import (
    LBFGS,
    MAE,
    MSE,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    Ftrl,
    L1Regularizer,
    L2Regularizer,
    Loss,
    RMSprop,
    SeveralIteration,
    Step,
    Top1Accuracy,
)
from kindler.compat.bigdl.util.common import Sample
from kindler.compat.zoo.feature.common import ChainedPreprocessing, SeqToMultipleTensors, SeqToTensor
from kindler.compat.zoo.orca.data import XShards
from kindler.compat.zoo.orca.learn.bigdl import Estimator
from kindler.compat.zoo.orca.learn.metrics import AUC, Accuracy, Precision, Recall
from kindler.compat.zoo.orca.learn.trigger import EveryEpoch
from kindler.errors import ConfigError
from tests.whole import WHOLE

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = (X @ np.array([[1.0], [-2.0], [0.5]]) + 0.3).astype("float32")
CLASSES = (X[:, 0] > 0).astype("float32") + 1.0


def shards(**columns: Any) -> Any:
    return XShards.partition(columns, num_shards=2, engine="local")


def descended(w: Any, b: Any, steps: int, rule: Any) -> tuple[Any, Any]:
    """Weights after steps of mean squared error over all rows."""
    w, b = w.astype("float64"), b.astype("float64")
    kept: dict[str, Any] = {}
    for number in range(1, steps + 1):
        error = X @ w.T + b - Y
        gradients = {"w": 2 * error.T @ X / len(X), "b": 2 * error.mean(0)}
        w = w - rule(number, gradients["w"], kept.setdefault("w", {}), w)
        b = b - rule(number, gradients["b"], kept.setdefault("b", {}), b)
    return w, b


def sgd(number: int, g: Any, kept: Any, value: Any) -> Any:
    g = g + 0.01 * value
    kept["v"] = g if number == 1 else 0.9 * kept["v"] + 0.1 * g
    return 0.1 / (1 + 0.5 * (number - 1)) * kept["v"]


def adam(number: int, g: Any, kept: Any, value: Any) -> Any:
    m = kept["m"] = 0.9 * kept.get("m", 0) + 0.1 * g
    v = kept["s"] = 0.999 * kept.get("s", 0) + 0.001 * g * g
    return 0.01 * np.sqrt(1 - 0.999**number) / (1 - 0.9**number) * m / (np.sqrt(v) + 1e-8)


def rmsprop(number: int, g: Any, kept: Any, value: Any) -> Any:
    kept["s"] = 0.99 * kept.get("s", 0) + 0.01 * g * g
    return 0.01 * g / (np.sqrt(kept["s"]) + 1e-8)


def adagrad(number: int, g: Any, kept: Any, value: Any) -> Any:
    kept["s"] = kept.get("s", 0) + g * g
    return 0.1 * g / (np.sqrt(kept["s"]) + 1e-10)


def adadelta(number: int, g: Any, kept: Any, value: Any) -> Any:
    kept["s"] = 0.9 * kept.get("s", 0) + 0.1 * g * g
    move = g * np.sqrt(kept.get("d", 0) + 1e-10) / np.sqrt(kept["s"] + 1e-10)
    kept["d"] = 0.9 * kept.get("d", 0) + 0.1 * move * move
    return move


def adamax(number: int, g: Any, kept: Any, value: Any) -> Any:
    kept["m"] = 0.9 * kept.get("m", 0) + 0.1 * g
    kept["u"] = np.maximum(0.999 * kept.get("u", 0), np.abs(g))
    return 0.002 / (1 - 0.9**number) * kept["m"] / kept["u"]


def stairs(number: int, g: Any, kept: Any, value: Any) -> Any:
    return 0.1 * 0.5 ** ((number - 1) // 2) * g


def regularized(number: int, g: Any, kept: Any, value: Any) -> Any:
    return 0.1 * (g + (0.2 * value if value.ndim == 2 else 0.3 * np.sign(value)))


def clipped(number: int, g: Any, kept: Any, value: Any) -> Any:
    return 0.1 * np.clip(g, -0.05, 0.1)


OPTIMIZERS = {
    "sgd": (SGD(0.1, 0.5, 0.01, 0.9), sgd),
    "adam": (Adam(0.01), adam),
    "rmsprop": (RMSprop(), rmsprop),
    "adagrad": (Adagrad(0.1), adagrad),
    "adadelta": (Adadelta(), adadelta),
    "adamax": (Adamax(), adamax),
    "schedule": (SGD(0.1, leaningrate_schedule=Step(2, 0.5)), stairs),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_make_the_steps_of_their_formulas(name: str) -> None:
    """The optimizer itself; below, the estimator has it."""
    import torch

    from kindler.compat.bigdl.optim.rules_torch import TorchRule

    method, rule = OPTIMIZERS[name]
    model = Linear(3, 1).double()
    expected = descended(*model.get_weights(), 5, rule)
    optimizer = TorchRule(method)(model, {})
    for _ in range(5):
        optimizer.zero_grad()
        MSECriterion()(model(torch.tensor(X, dtype=torch.float64)), torch.tensor(Y)).backward()
        optimizer.step()

    for found, wanted in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    again = TorchRule(method)(model, {})
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == pytest.approx(method.rate(5))


def test_ftrl_keeps_small_weights_at_zero_and_lbfgs_is_refused() -> None:
    import torch

    from kindler.compat.bigdl.optim.rules_torch import TorchRule

    model = Linear(3, 1, init_weight=np.zeros((1, 3)), init_bias=np.zeros(1))
    optimizer = TorchRule(Ftrl(0.1, l1_regularization_strength=100.0))(model, {})
    MSECriterion()(model(torch.tensor(X)), torch.tensor(Y)).backward()
    optimizer.step()
    assert not model.get_weights()[0].any()
    with pytest.raises(ConfigError, match="LBFGS trains TensorFlow graphs"):
        TorchRule(LBFGS())


def test_an_estimator_trains_clips_judges_predicts_and_is_saved(tmp_path: Path) -> None:
    model = Sequential().add(
        Linear(3, 1, wRegularizer=L2Regularizer(0.2), bRegularizer=L1Regularizer(0.3)).set_name("fc")
    )
    data = shards(x=X, y=Y)
    first = model.get_weights()
    est = Estimator.from_bigdl(
        model=model,
        loss=MSECriterion(),
        optimizer=SGD(0.1),
        metrics=[MAE(), Loss()],
        model_dir=str(tmp_path / "checkpoints"),
    )
    assert est.get_train_summary("Loss") is None
    est.set_tensorboard(str(tmp_path), "app")
    est.fit(data, 3, batch_size=24, validation_data=data, checkpoint_trigger=EveryEpoch())
    trained = est.get_model().get_weights()
    for found, wanted in zip(trained, descended(*first, 3, regularized), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4)
    assert est.get_train_summary("Loss").shape == (3, 3)
    assert est.get_validation_summary("MAE").shape == (3, 3)
    assert est.optimizer.state == {"epoch": 4, "neval": 4}

    with pytest.warns(UserWarning, match="epochs=3 counts from when the model was created"):
        est.fit(data, 3, batch_size=24)
    assert all(np.array_equal(a, b) for a, b in zip(est.get_model().get_weights(), trained, strict=True))

    error = X @ trained[0].T + trained[1] - Y
    scores = est.evaluate(data, batch_size=5)
    assert scores == pytest.approx({"MAE": np.abs(error).mean(), "Loss": np.square(error).mean()}, rel=1e-4)
    predicted = np.concatenate([shard["prediction"] for shard in est.predict(data).collect()])
    np.testing.assert_allclose(predicted, X @ trained[0].T + trained[1], rtol=1e-4, atol=1e-5)

    est.save(str(tmp_path / "model"))
    other = Estimator.from_bigdl(model=Sequential().add(Linear(3, 1)), loss=MSECriterion())
    other.load(str(tmp_path / "model"), optimizer=SGD(0.1))
    again = np.concatenate([shard["prediction"] for shard in other.predict(data).collect()])
    np.testing.assert_array_equal(again, predicted)
    assert "fc" in other.get_model().parameters()

    est.load_orca_checkpoint(str(tmp_path / "checkpoints"), version=1)
    np.testing.assert_allclose(
        est.get_model().get_weights()[0], descended(*first, 1, regularized)[0], rtol=1e-4
    )


def test_gradients_are_clipped_between_limits_and_to_a_norm() -> None:
    data = shards(x=X, y=Y)
    model = Linear(3, 1)
    first = model.get_weights()
    est = Estimator.from_bigdl(model=model, loss=MSECriterion(), optimizer=SGD(0.1))
    est.set_constant_gradient_clipping(-0.05, 0.1)
    est.fit(data, 2, batch_size=24)
    expected = descended(*first, 2, clipped)
    for found, wanted in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4)

    est.clear_gradient_clipping()
    est.set_l2_norm_gradient_clipping(0.01)
    before = np.concatenate([part.ravel() for part in model.get_weights()])
    est.fit(data, 3, batch_size=24)
    after = np.concatenate([part.ravel() for part in model.get_weights()])
    assert np.linalg.norm(after - before) == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_labels_begin_with_1_for_the_loss_and_for_every_metric(tmp_path: Path) -> None:
    model = Sequential().add(Linear(3, 2)).add(LogSoftMax())
    metrics = [Accuracy(), AUC(), Top1Accuracy()]
    est = Estimator.from_bigdl(model=model, loss=ClassNLLCriterion(), optimizer=Adam(0.1), metrics=metrics)
    data = shards(x=X, y=CLASSES)

    est.fit(data, 12, batch_size=8)
    scores = est.evaluate(data)

    outputs = np.concatenate([shard["prediction"] for shard in est.predict(data).collect()])
    right = outputs.argmax(1) + 1 == CLASSES
    assert right.mean() >= 0.95
    assert scores["Top1Accuracy"] == pytest.approx(right.mean())
    assert scores["AucScore"] == pytest.approx(AUC().score(outputs, CLASSES - 1))
    with pytest.raises(ValueError, match="whole numbers from 1 to 2"):
        est.fit(shards(x=X, y=CLASSES - 1), 13, batch_size=8)


def test_several_inputs_come_from_lists_or_are_cut_from_one_vector() -> None:
    model = Sequential().add(ParallelTable().add(Linear(1, 2)).add(Linear(2, 2))).add(CAddTable())
    est = Estimator.from_bigdl(
        model=model, loss=MSECriterion(), feature_preprocessing=SeqToMultipleTensors([[1], [2]])
    )
    (w, b), (v, c) = (layer.get_weights() for layer in model.layers[0].layers)

    joined = est.predict(shards(x=X)).collect()
    apart = est.predict(shards(x=[X[:, :1], X[:, 1:]])).collect()

    expected = X[:, :1] @ w.T + b + X[:, 1:] @ v.T + c
    for found in (joined, apart):
        np.testing.assert_allclose(
            np.concatenate([s["prediction"] for s in found]), expected, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": np.tanh}, "model must be one of bigdl.nn.layer"),
        ({"feature_preprocessing": "abc"}, "feature_preprocessing must be a shape"),
        ({"label_preprocessing": np.tanh}, "label_preprocessing must be a shape"),
        ({"metrics": "acuracy"}, "unknown validation method 'acuracy'"),
    ],
)
def test_arguments_that_cannot_work_are_runtime_errors_as_in_orca(options: Any, problem: str) -> None:
    with pytest.raises(RuntimeError, match=problem) as caught:
        Estimator.from_bigdl(**{"model": Linear(3, 1), "loss": MSECriterion(), **options})
    assert isinstance(caught.value, ConfigError)


def test_calls_that_cannot_work_say_so() -> None:
    est = Estimator.from_bigdl(model=Linear(3, 1), loss=MSECriterion(), optimizer=Adam())
    with pytest.raises(RuntimeError, match="evaluate needs metrics"):
        est.evaluate(shards(x=X, y=Y))
    with pytest.raises(RuntimeError, match="is not below"):
        est.set_constant_gradient_clipping(1.0, -1.0)
    with pytest.raises(RuntimeError, match="must be above 0"):
        est.set_l2_norm_gradient_clipping(0)
    with pytest.raises(RuntimeError, match="pass model_dir"):
        est.fit(shards(x=X, y=Y), 1, checkpoint_trigger=SeveralIteration(2))
    with pytest.raises(RuntimeError, match="checkpoint_trigger must be a trigger"):
        est.fit(shards(x=X, y=Y), 1, checkpoint_trigger=3)
    shaped = Estimator.from_bigdl(
        model=Linear(4, 1),
        loss=MSECriterion(),
        feature_preprocessing=ChainedPreprocessing([SeqToTensor([4])]),
    )
    with pytest.raises(ValueError, match="do not fill the shape"):
        shaped.predict(shards(x=X))


def lenet() -> Any:
    """LeNet, as BigDL's own example builds it."""
    model = Sequential()
    model.add(Reshape([1, 28, 28]))
    model.add(SpatialConvolution(1, 6, 5, 5).set_name("conv1_5x5"))
    model.add(Tanh())
    model.add(SpatialMaxPooling(2, 2, 2, 2))
    model.add(SpatialConvolution(6, 12, 5, 5).set_name("conv2_5x5"))
    model.add(Tanh())
    model.add(SpatialMaxPooling(2, 2, 2, 2))
    model.add(Reshape([12 * 4 * 4]))
    model.add(Linear(12 * 4 * 4, 100).set_name("fc1"))
    model.add(Tanh())
    model.add(Linear(100, 10).set_name("fc2"))
    model.add(LogSoftMax())
    return model


@pytest.mark.timeout(1800)
def test_lenet_of_bigdl_layers_learns_mnist(mnist: Path) -> None:
    rows, epochs, wanted = (60000, 3, 0.97) if WHOLE else (4000, 2, 0.85)
    images, labels = (read_idx(mnist, f"train-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    train = shards(x=images[:rows].astype("float32") / 255, y=labels[:rows] + 1.0)
    est = Estimator.from_bigdl(
        model=lenet(), loss=ClassNLLCriterion(), optimizer=Adam(2e-3), metrics=[Top1Accuracy()]
    )

    est.fit(train, epochs, batch_size=64)

    images, labels = (read_idx(mnist, f"t10k-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    count = 10000 if WHOLE else 1000
    scores = est.evaluate(shards(x=images[:count].astype("float32") / 255, y=labels[:count] + 1.0), 500)
    assert scores["Top1Accuracy"] >= wanted


def read_idx(folder: Path, name: str) -> Any:
    import gzip

    with gzip.open(folder / f"{name}.gz") as file:
        head = int.from_bytes(file.read(4), "big")
        shape = [int.from_bytes(file.read(4), "big") for _ in range(head & 255)]
        return np.frombuffer(file.read(), np.uint8).reshape(shape)


def test_counts_of_right_and_wrong_rows_are_merged() -> None:
    truth = (X[:, 0] > 0.2).astype("float32")
    model = Sequential().add(Linear(3, 1, init_weight=np.array([[1.0, 0.0, 0.5]]))).add(Sigmoid())
    est = Estimator.from_bigdl(model=model, loss=BCECriterion(), metrics=[Precision(), Recall()])
    found = est.evaluate(shards(x=X, y=truth), 5)

    guess = model.forward(X)[:, 0] > 0.5
    both = (guess & (truth == 1)).sum()
    assert found == pytest.approx({"Precision": both / guess.sum(), "Recall": both / truth.sum()})


def test_columns_of_labels_become_one_vector_and_a_loss_may_be_judged_by_another() -> None:
    labels = np.hstack([Y, -Y])
    frame = pd.DataFrame({"x": list(X), "a": labels[:, 0], "b": labels[:, 1]})
    data = XShards.from_shards([frame[:10], frame[10:]], engine="local")
    model = Sequential().add(Linear(3, 2))
    est = Estimator.from_bigdl(
        model=model, loss=MSECriterion(), optimizer=SGD(0.0), metrics=[MAE(), Loss(AbsCriterion()), MSE()]
    )
    columns = {"feature_cols": "x", "label_cols": ["a", "b"]}
    est.fit(data, 1, batch_size=24, validation_data=data, **columns)
    found = est.evaluate(data, **columns)
    errors = model.predict(X) - labels
    assert found["Loss"] == pytest.approx(np.abs(errors).mean(), rel=1e-4)
    assert found["MAE"] == pytest.approx(found["Loss"], rel=1e-5)
    assert found["MSE"] == pytest.approx((errors**2).mean(), rel=1e-4)
    results = model.evaluate([Sample.from_ndarray(*pair) for pair in zip(X, labels, strict=True)], 4,
                             [Loss(MSECriterion())])  # fmt: skip
    assert results[0].result == pytest.approx((errors**2).mean(), rel=1e-4)
