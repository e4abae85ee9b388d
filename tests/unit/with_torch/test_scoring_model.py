"""What scoring is sent of a PyTorch model: its parameters and buffers, once, and as they are now."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Estimator
from kindler.estimator.model import LiveModel
from kindler.frameworks.state_format import ScoringModel

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
WIDE = 20_000
WEIGHTS = (8 * WIDE + WIDE) * 4 + (WIDE + 1) * 4  # bytes


class Net(nn.Module):
    """With all that a model may hold: a tied layer, a buffer that is not in its state, a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDE)
        self.last = nn.Linear(WIDE, 1)
        self.again = self.last
        self.register_buffer("shift", torch.zeros(1), persistent=False)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scored: torch.Tensor = self.again(torch.relu(self.first(x))) * self.scale + self.shift
        return scored


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def trained(model: Any) -> Estimator:
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam,
        loss=nn.MSELoss(),
        metrics=["mae"],
        scheduler=lambda optimizer, config: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        workers=1,
    )
    est.fit((X, X[:, :1]), epochs=1, verbose=0)
    return est


def live(est: Estimator) -> LiveModel:
    return est._live


def here(model: nn.Module) -> Any:
    with torch.no_grad():
        return model.eval()(torch.tensor(X)).numpy()


@pytest.fixture(scope="module")
def est() -> Estimator:
    return trained(made())


def size(sent: ScoringModel) -> int:
    return len(pickle.dumps(sent))


def test_a_trained_model_is_sent_without_its_optimizer_and_each_weight_once(est: Estimator) -> None:
    assert WEIGHTS < size(live(est).for_scoring()) < WEIGHTS + 20_000


def test_so_is_one_that_a_creator_makes() -> None:
    assert WEIGHTS < size(live(trained(made)).for_scoring()) < WEIGHTS + 20_000


def test_a_model_that_nobody_has_touched_is_packed_once(est: Estimator) -> None:
    assert live(est).for_scoring() is live(est).for_scoring()


def zero_through_data(model: Net) -> None:
    model.first.weight.data[3, 3] += 10


def write_through_numpy(model: Net) -> None:
    model.first.weight.detach().numpy()[5, 5] += 10


def load_others(model: Net) -> None:
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def step(model: Net) -> None:
    with torch.no_grad():
        model.last.bias += 1


def change_a_buffer(model: Net) -> None:
    model.shift += 3


def change_a_number(model: Net) -> None:
    model.scale = 2.0


def replace_a_layer(model: Net) -> None:
    model.again = nn.Linear(WIDE, 1)


@pytest.mark.parametrize(
    "change",
    [
        zero_through_data,
        write_through_numpy,
        load_others,
        step,
        change_a_buffer,
        change_a_number,
        replace_a_layer,
    ],
)
def test_whatever_is_changed_in_the_model_shows_in_the_next_prediction(
    est: Estimator, change: Callable[[Net], None]
) -> None:
    model = est.get_model()
    before = est.predict(X, verbose=0)

    change(model)

    after = est.predict(X, verbose=0)
    assert after == pytest.approx(here(model), abs=1e-5)
    assert not np.array_equal(after, before)


def test_a_creators_model_that_was_changed_predicts_so_too() -> None:
    est = trained(made)
    est.predict(X, verbose=0)

    est.get_model().first.weight.data += 1

    assert est.predict(X, verbose=0) == pytest.approx(here(est.get_model()), rel=1e-4)


def test_layers_that_share_weights_still_do_where_they_arrive(est: Estimator) -> None:
    model = made()
    packed = Estimator.from_torch(model=model)._live.for_scoring()

    arrived = type(est._live.replica).loads(packed.spec).model

    assert arrived.again is arrived.last
    assert arrived.again.weight.data_ptr() == arrived.last.weight.data_ptr()
    assert here(arrived) == pytest.approx(here(model))
