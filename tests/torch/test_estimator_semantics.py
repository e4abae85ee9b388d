"""What users do besides: freezing, losses that learn, padding, modes; on real workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from kindler import Estimator
from kindler.callbacks import Callback
from kindler.errors import ConfigError, DataError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

X = np.random.default_rng(0).standard_normal((24, 4), dtype=np.float32)
Y = X.sum(axis=1, keepdims=True)


def _network() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    model[0].requires_grad_(False)
    model[1].eval()  # a frozen BatchNorm
    return model


class Scaled(nn.Module):
    """A loss that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs - targets) ** 2).mean() * torch.exp(-self.scale) + self.scale


class Unfreeze(Callback):
    """Unfreezes the first layer in the second epoch, and meanwhile looks at the model in its own way."""

    def on_epoch_begin(self, run: Any) -> None:
        if run.epoch == 2:
            run.model[0].requires_grad_(True)

    def on_step_end(self, run: Any) -> None:
        run.model.eval()

    def on_epoch_end(self, run: Any, logs: dict[str, Any]) -> None:
        assert not run.model[1].training
        run.model.train()
        run.model[2].eval()


def _plain(epochs: int) -> tuple[nn.Sequential, Scaled]:
    """The same, by hand: whole batches, so that neither order nor splits matter."""
    model, loss = _network(), Scaled()
    optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=0.05)
    for epoch in range(1, epochs + 1):
        if epoch == 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        loss(model(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
        optimizer.step()
    return model, loss


def test_unfreezing_modes_and_a_loss_that_learns_are_those_of_one_process(tmp_path: Path) -> None:
    model, loss = _network(), Scaled()
    optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=0.05)
    est = Estimator.from_torch(model=model, optimizer=optimizer, loss=loss, workers=2)
    options: dict[str, Any] = {"batch_size": 24, "callbacks": [Unfreeze()], "verbose": 0}
    options["checkpoint"] = tmp_path / "run"

    est.fit((X, Y), epochs=3, **options)

    assert model[0].weight.requires_grad, "the model comes back as the run left it"
    _assert_same(model, loss, 3)
    est.fit((X, Y), epochs=1, **options)  # the model was in evaluation mode in between
    _assert_same(model, loss, 4)

    again, other = _network(), Scaled()
    resumed = Estimator.from_torch(
        model=again,
        optimizer=torch.optim.Adam([*again.parameters(), *other.parameters()], lr=0.05),
        loss=other,
        workers=2,
    )
    resumed.fit((X, Y), epochs=5, resume=True, **options)
    _assert_same(again, other, resumed.history["epoch"][-1])


def _assert_same(model: nn.Module, loss: nn.Module, epochs: int) -> None:
    wanted, wanted_loss = _plain(epochs)
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, atol=1e-5, rtol=0, msg=name)
    torch.testing.assert_close(loss.scale, wanted_loss.scale, atol=1e-5, rtol=0)


def test_layers_that_the_user_unfreezes_between_two_fits_are_trained() -> None:
    model = _network()
    est = Estimator.from_torch(
        model=model,
        optimizer=lambda m: torch.optim.SGD(
            [p for p in m.parameters() if p.requires_grad], 0.1, momentum=0.9
        ),
        loss=nn.MSELoss(),
        workers=2,
    )
    before = model[0].weight.detach().clone()
    est.fit((X, Y), batch_size=24, verbose=0)
    assert torch.equal(model[0].weight, before)

    model[0].requires_grad_(True)
    est.fit((X, Y), batch_size=24, verbose=0)
    assert not torch.equal(model[0].weight, before)


TOKENS = [np.random.default_rng(i).integers(1, 9, 1 + i % 7) for i in range(20)]


def _padded(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x = nn.utils.rnn.pad_sequence([torch.from_numpy(TOKENS[i]) for i in rows], batch_first=True)
    return x, torch.where(x == 0, 0, x % 4 + 1)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(9, 6), nn.Linear(6, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(tokens)).transpose(1, 2)


def test_a_loader_that_pads_each_batch_trains_as_in_one_process() -> None:
    model, plain = Tagger(), Tagger()
    loss = nn.CrossEntropyLoss(ignore_index=0)
    loader = DataLoader(range(20), batch_size=6, collate_fn=_padded)  # type: ignore[arg-type]
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        loss=loss,
        metrics="accuracy",
        workers=2,
    )

    history = est.fit(loader, epochs=2, validation_data=loader, verbose=0)

    optimizer, means = torch.optim.SGD(plain.parameters(), lr=0.5), []
    for _ in range(2):
        total, kept = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            value = loss(plain(x), y)
            value.backward()
            optimizer.step()
            total, kept = total + value.item() * int((y != 0).sum()), kept + int((y != 0).sum())
        means.append(total / kept)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=0)
    assert history["loss"] == pytest.approx(means, rel=1e-5)
    x, y = _padded(list(range(20)))
    assert history["val_loss"][-1] == pytest.approx(loss(plain(x), y).item(), rel=1e-5)
    right = (plain(x).argmax(1) == y)[y != 0].double().mean().item()
    assert history["val_accuracy"][-1] == pytest.approx(right)


def test_a_label_that_is_no_class_is_refused_in_fit_and_in_evaluate() -> None:
    labels = np.arange(24) % 3
    est = Estimator.from_torch(
        model=lambda: nn.Linear(4, 3), optimizer=torch.optim.SGD, loss=nn.CrossEntropyLoss(), workers=2
    )

    with pytest.raises(
        DataError, match=r"column 'y', row .*is [012]\.5, which is not a class number"
    ) as error:
        est.fit((X, labels + 0.5), batch_size=8, verbose=0)
    assert error.value.column == "y"
    with pytest.raises(DataError, match="column 'y', row .*is 7, but the model's output has 3 classes"):
        est.evaluate((X, np.where(labels == 1, 7, labels)), verbose=0)


class Lazy(nn.Module):
    """Registers a buffer, and one that is only a memory, when it is first called."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.last, self.persistent = nn.Linear(4, 1), persistent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("seen", torch.ones(len(x)), persistent=self.persistent)
        return self.last(x)


def test_a_buffer_registered_in_forward_is_refused_unless_it_is_only_a_memory() -> None:
    def fit(persistent: bool) -> None:
        est = Estimator.from_torch(
            model=lambda: Lazy(persistent), optimizer=torch.optim.SGD, loss=nn.MSELoss(), workers=2
        )
        est.fit((X, Y), batch_size=8, verbose=0)
        est.get_model()

    fit(persistent=False)
    with pytest.raises(
        ConfigError, match=r"(?s)registered the buffer 'seen' during.*Hint: register it in __init__"
    ):
        fit(persistent=True)


def test_sparse_adam_is_refused_on_several_workers_and_sparse_gradients_are_not() -> None:
    ids, target = np.arange(24) % 5, np.ones((24, 2), np.float32)

    def estimator(optimizer: Any, workers: int) -> Estimator:
        def table() -> nn.Module:
            torch.manual_seed(0)
            return nn.Embedding(7, 2, sparse=True)

        return Estimator.from_torch(model=table, optimizer=optimizer, loss=nn.MSELoss(), workers=workers)

    with pytest.raises(ConfigError, match=r"(?s)SparseAdam.*Hint: use Adam with Embedding\(sparse=False\)"):
        estimator(torch.optim.SparseAdam, 2).fit((ids, target), verbose=0)
    found = []
    for workers in (1, 2):
        est = estimator(torch.optim.Adagrad, workers)
        est.fit((ids, target), epochs=2, batch_size=24, verbose=0)
        found.append(est.get_model().weight)
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=0)
