"""MXNet estimators: two workers are one, functions of (config, kv) give every row once, models come back."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler import Estimator, RunSettings, XShards
from kindler.callbacks import LearningRateMonitor
from kindler.compat.frameworks.mxnet import create_config
from kindler.compat.frameworks.mxnet.library import mx
from kindler.compat.zoo.orca.learn.mxnet import Estimator as OrcaEstimator
from kindler.errors import ConfigError
from tests.mxnet import networks
from tests.mxnet.networks import rows
from tests.whole import WHOLE

X, Y = rows()
ADAM = create_config("adam", {"learning_rate": 0.05}, seed=3)


def estimator(workers: int = 1, model: Any = networks.classifier, **options: Any) -> Estimator:
    given: dict[str, Any] = {"config": ADAM, "eval_metrics_creator": networks.accuracy, **options}
    return Estimator.from_mxnet(
        model_creator=model,
        loss_creator=networks.softmax_loss,
        workers=workers,
        settings=RunSettings(threads=1),
        **given,
    )


def parameters(est: Estimator) -> list[Any]:
    net = est.get_model()
    return [p.data().asnumpy() for p in net._collect_params_with_prefix().values()]


def close(found: Any, expected: Any, atol: float = 1e-5) -> None:
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def alone() -> tuple[Estimator, Any]:
    """Two epochs by one worker."""
    est = estimator()
    return est, est.fit((X, Y), epochs=2, batch_size=20, validation_data=(X[:30], Y[:30]), verbose=0)


def test_two_workers_of_uneven_rows_end_where_one_does(alone: tuple[Estimator, Any]) -> None:
    both = estimator(workers=2)
    history = both.fit((X, Y), epochs=2, batch_size=20, validation_data=(X[:30], Y[:30]), verbose=0)

    close(parameters(both), parameters(alone[0]))
    for name in ("loss", "accuracy", "val_loss", "val_accuracy", "num_samples"):
        assert history[name] == pytest.approx(alone[1][name], abs=1e-5)
    figures = both.evaluate((X, Y), batch_size=7, verbose=0)
    scores = both.predict(X, batch_size=11)
    assert figures["accuracy"] == pytest.approx((scores.argmax(axis=1) == Y).mean())
    assert figures["num_samples"] == 96


def test_it_trains_as_gluons_own_trainer_does(alone: tuple[Estimator, Any]) -> None:
    est = estimator()
    est.fit((X, Y), epochs=1, batch_size=24, shuffle=False, verbose=0)

    mx.random.seed(3)
    net = networks.classifier({})
    net(mx.nd.zeros((1, 4)))
    mx.random.seed(3)
    net.initialize(mx.init.Xavier(), force_reinit=True)
    trainer = mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.05})
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for first in range(0, 96, 24):
        x, y = mx.nd.array(X[first : first + 24]), mx.nd.array(Y[first : first + 24])
        with mx.autograd.record():
            value = loss(net(x), y)
        value.backward()
        trainer.step(24)
    close(parameters(est), [p.data().asnumpy() for p in net._collect_params_with_prefix().values()])


@pytest.mark.parametrize("function", [networks.ndarray_iter, networks.loader], ids=["iter", "loader-by-rank"])
def test_functions_of_config_and_kv_give_every_row_once(function: Any) -> None:
    est = estimator(workers=2)
    history = est.fit(function, epochs=1, batch_size=8, verbose=0)

    assert history["num_samples"] == [50]
    assert est.evaluate(function, batch_size=6, verbose=0)["num_samples"] == 50


def test_iterators_train_the_same_on_two_workers_as_on_one() -> None:
    ends = []
    for workers in (1, 2):
        est = estimator(workers, config=create_config("sgd", {"learning_rate": 0.1, "momentum": 0.9}, seed=1))
        est.fit(networks.ndarray_iter, epochs=2, batch_size=10, verbose=0)
        ends.append(parameters(est))

    close(ends[1], ends[0])


def test_shards_are_trained_judged_and_scored(tmp_path: Path) -> None:
    shards = XShards.from_shards([{"x": X[:10], "y": Y[:10]}, {"x": X[10:], "y": Y[10:]}], engine="local")
    est = estimator(workers=2, model=networks.normed)
    est.fit(shards, epochs=6, batch_size=16, verbose=0)
    scored = np.concatenate([shard["prediction"] for shard in est.predict(shards, verbose=0).collect()])

    assert est.evaluate(shards, verbose=0)["accuracy"] == pytest.approx((scored.argmax(axis=1) == Y).mean())
    assert (scored.argmax(axis=1) == Y).mean() > 0.8


def test_models_estimators_and_checkpoints_come_back(alone: tuple[Estimator, Any], tmp_path: Path) -> None:
    est, _ = alone
    expected = est.predict(X)
    est.save(tmp_path / "net.params")
    est.save(tmp_path / "net.estimator")
    est.save_checkpoint(tmp_path / "one.kindler")

    np.testing.assert_allclose(
        estimator().load_weights(tmp_path / "net.params").predict(X), expected, atol=1e-6
    )
    net = networks.classifier({})
    net.load_parameters(str(tmp_path / "net.params"))
    np.testing.assert_allclose(net(mx.nd.array(X)).asnumpy(), expected, atol=1e-6)
    others = [
        Estimator.load(tmp_path / "net.estimator", trusted=True),
        estimator().load_checkpoint(tmp_path / "one.kindler"),
    ]
    est.fit((X, Y), epochs=1, batch_size=20, verbose=0)
    for other in others:
        other.fit((X, Y), epochs=1, batch_size=20, verbose=0)
        close(parameters(other), parameters(est))  # Adam's moments and the order of rows went along


def test_schedules_and_losses_are_those_of_gluon() -> None:
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1)
    config = create_config("sgd", {"learning_rate": 0.1, "lr_scheduler": schedule})
    history = estimator(config=config).fit(
        (X, Y), epochs=3, batch_size=48, callbacks=[LearningRateMonitor()], verbose=0
    )

    assert history["lr"] == pytest.approx([0.1, 0.1, 0.05])  # MXNet halves it before steps 3, 5, ...


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"config": create_config("nothing")}, "optimizer='nothing'"),
        ({"model": lambda config: 3}, "must return a mxnet.gluon.Block"),
        ({"eval_metrics_creator": lambda config: mx.metric.PearsonCorrelation()}, "several workers"),
    ],
)
def test_what_creators_make_is_checked(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        estimator(**options).fit((X, Y), batch_size=48, verbose=0)


def test_what_is_not_a_creator_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"model_creator must be a function of the config"):
        estimator(model=None)
    with pytest.raises(ConfigError, match=r"config must be a dict"):
        estimator(config=[1])
    est = Estimator.from_mxnet(ADAM, networks.classifier, workers=1)
    with pytest.raises(ConfigError, match=r"needs a loss; pass a loss_creator to Estimator.from_mxnet"):
        est.fit((X, Y), verbose=0)


def _mnist(folder: Path, kind: str, count: int) -> tuple[Any, Any]:
    def read(name: str, skip: int) -> Any:
        path = next(folder.glob(f"{kind}-{name}*"))
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return np.frombuffer(data, np.uint8, offset=skip)

    images = read("images", 16).reshape(-1, 1, 28, 28)[:count].astype("float32") / 255
    return images, read("labels", 8)[:count].astype("float32")


def test_lenet_learns_mnist_with_two_workers(mnist: Path) -> None:
    x, y = _mnist(mnist, "train", 60_000 if WHOLE else 1_500)
    test = _mnist(mnist, "t10k", 10_000 if WHOLE else 300)
    config = create_config("adam", {"learning_rate": 0.002})
    est = estimator(workers=2, model=networks.lenet, config=config)
    est.fit((x, y), epochs=1 if WHOLE else 3, batch_size=128 if WHOLE else 64, verbose=0)

    assert est.evaluate(test, verbose=0)["accuracy"] >= (0.97 if WHOLE else 0.88)


def symbols() -> Any:
    """A layer of symbols, and the module that would train it."""
    layer = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="layer")
    return layer, mx.mod.Module(mx.sym.SoftmaxOutput(layer, name="softmax"), context=mx.cpu())


def test_modules_of_symbols_are_refused_and_a_block_of_symbols_is_trained() -> None:
    refused = estimator(model=lambda config: symbols()[1])
    with pytest.raises(ConfigError, match="modules of symbols .mx.mod.Module. are not supported"):
        refused.fit((X, Y), epochs=1, batch_size=20, verbose=0)
    est = estimator(model=lambda config: mx.gluon.SymbolBlock(symbols()[0], mx.sym.var("data")))
    losses = est.fit((X, Y), epochs=3, batch_size=20, verbose=0)["loss"]
    assert losses[-1] < losses[0]
    weight, bias = parameters(est)
    np.testing.assert_allclose(est.predict(X[:4], verbose=0), X[:4] @ weight.T + bias, rtol=1e-4, atol=1e-5)


def test_an_epoch_of_orcas_estimator_has_the_batches_that_it_is_resized_to() -> None:
    est = OrcaEstimator.from_mxnet(
        config=ADAM, model_creator=networks.classifier, loss_creator=networks.softmax_loss
    )
    shards = XShards.partition({"x": X, "y": Y}, num_shards=2, engine="local")
    (row,) = est.fit(shards, epochs=1, batch_size=8, train_resize_batch_num=2)
    assert (row["steps"], row["num_samples"]) == (2, 16)
