"""A model that a creator makes and nobody has trained does not pass for a trained one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn, optim

from kindler import Estimator, Store
from kindler.errors import UntrainedWarning

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

X = np.random.default_rng(0).standard_normal((12, 3), dtype=np.float32)
DATA = (X, X.sum(axis=1, keepdims=True))


def make_model(config: dict[str, Any]) -> nn.Module:
    return nn.Linear(3, 1)


def estimator(model: Any = make_model, **options: Any) -> Estimator:
    adam = functools.partial(optim.Adam, lr=0.1)
    options = {"optimizer": adam, "loss": nn.MSELoss(), "workers": 2, "engine": "local", **options}
    return Estimator.from_torch(model=model, **options)


CALLS: dict[str, Callable[[Estimator, Path], Any]] = {
    "predict": lambda est, folder: est.predict(X),
    "evaluate": lambda est, folder: est.evaluate(DATA, verbose=0),
    "save": lambda est, folder: est.save(folder / "weights.pt"),
    "save whole": lambda est, folder: est.save(folder / "all.estimator"),
    "to_onnx": lambda est, folder: est.to_onnx(folder / "net.onnx", X),
    "put": lambda est, folder: Store(folder / "store").models.put(est, "net"),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_uses_random_weights_warns_at_the_users_line(call: str, tmp_path: Path) -> None:
    with pytest.warns(UntrainedWarning, match=r"(?s)never trained.*seed=0.*Hint: call fit\(\)") as told:
        CALLS[call](estimator(), tmp_path)

    assert {warning.filename for warning in told if warning.category is UntrainedWarning} == {__file__}


def test_random_weights_are_those_of_the_seed_in_every_call_worker_and_file(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)
        first = estimator().predict(X)
        assert np.array_equal(estimator().predict(X), first)
        assert not np.array_equal(estimator(seed=1).predict(X), first)
        judged = estimator().evaluate(DATA, verbose=0)["loss"]
        estimator().save(tmp_path / "all.estimator")
        again = Estimator.load(tmp_path / "all.estimator", trusted=True).predict(X)

    assert judged == pytest.approx(np.square(first - DATA[1]).mean(), rel=1e-5)
    assert np.array_equal(again, first)


def test_models_that_were_given_trained_or_loaded_do_not_warn(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        estimator(make_model({})).predict(X)
        trained = estimator()
        trained.fit(DATA, epochs=1, batch_size=6, verbose=0)
        trained.predict(X)
        trained.save(tmp_path / "weights.pt")
        estimator().load_weights(tmp_path / "weights.pt").predict(X)
        trained.save_checkpoint(tmp_path / "one.kindler")
        estimator().load_checkpoint(tmp_path / "one.kindler").predict(X)
        trained.copy().predict(X)


def test_whoever_reads_an_untrained_estimator_from_a_store_is_told(tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    with pytest.warns(UntrainedWarning, match="^put"):
        om.models.put(estimator(), "net")

    with pytest.warns(UntrainedWarning, match="was stored untrained"):
        om.models.get("net")
