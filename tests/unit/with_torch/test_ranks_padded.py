"""Batches that are padded to their own length: two ranks compute what one process does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gang import GangWorker, attach, run_ranks
from torch import nn
from torch.nn import functional as F

from kindler.errors import ConfigError
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from tests.unit.with_torch.rows import Array, Rows

pytestmark = pytest.mark.torch

STEPS, ROWS, TOKENS, KINDS, PAD = 3, 8, 11, 5, -1
CUT = slice(0, 3), slice(3, ROWS)


class Tagger(nn.Module):
    """Scores (rows, kinds, length) of each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(TOKENS, 6), nn.Linear(6, KINDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.table(tokens))).transpose(1, 2)


class Copier(Tagger):
    """One value (rows, length) of each token."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens)[:, 0]


def _rows(step: int, part: slice, real: bool) -> tuple[Array, Array]:
    """Rows of many lengths, padded to the longest of this part."""
    draw = np.random.default_rng(step)
    lengths = draw.permutation(np.arange(1, ROWS + 1) * 3)
    tokens = [draw.integers(1, TOKENS, length) for length in lengths][part]
    widest = max(len(row) for row in tokens)
    x = np.stack([np.pad(row, (0, widest - len(row))) for row in tokens])
    if real:
        return x, (np.sin(x) * 3).astype(np.float32)
    return x, np.where(x == 0, PAD, x % KINDS)


def _own(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Not reduced: one loss of each token that is not padding."""
    losses = F.cross_entropy(outputs, targets, ignore_index=PAD, reduction="none")
    return losses[targets != PAD]


def _own_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Over all values of a batch, padding included; so also over its rows, which have one length."""
    return F.cross_entropy(outputs, targets.clamp_min(0))


WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0])
BY_TOKEN: dict[str, Callable[[], Any]] = {
    "cross-entropy": lambda: nn.CrossEntropyLoss(ignore_index=PAD),
    "weighted": lambda: nn.CrossEntropyLoss(ignore_index=PAD, weight=WEIGHTS),
    "smoothed": lambda: nn.CrossEntropyLoss(ignore_index=PAD, weight=WEIGHTS, label_smoothing=0.2),
    "functional": lambda: functools.partial(F.cross_entropy, ignore_index=PAD),
    "summed": lambda: nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum"),
    "own": lambda: _own,
}
BY_VALUE: dict[str, Callable[[], Any]] = {"mse": nn.MSELoss, "l1": lambda: F.l1_loss}
LOSSES = BY_TOKEN | BY_VALUE


def _mean(loss: Any, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = loss(outputs, targets)
    return value.mean() if value.dim() else value


def _whole(name: str, step: int) -> tuple[Array, Array]:
    """What one process sees."""
    return _rows(step, slice(0, ROWS), name in BY_VALUE)


def _reference(name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = Copier() if name in BY_VALUE else Tagger()
    optimizer, loss, values = torch.optim.SGD(model.parameters(), lr=0.01), LOSSES[name](), []
    for step in range(STEPS):
        optimizer.zero_grad()
        if name in BY_VALUE:  # a mean over all values of both parts, each with its own padding
            parts = [[torch.from_numpy(p) for p in _rows(step, part, True)] for part in CUT]
            count = sum(y.numel() for _, y in parts)
            value = sum(loss(model(x), y) * y.numel() for x, y in parts) / count
        else:
            x, y = (torch.from_numpy(part) for part in _whole(name, step))
            value = _mean(loss, model(x), y)
        value.backward()
        optimizer.step()
        values.append(value.item())
    return dict(model.state_dict()), values


def _replica(name: str, rank: int, loss: Any = None) -> TorchReplica:
    real = name in BY_VALUE
    _, first = _rows(0, CUT[0], real)
    spec = TorchSpec(
        model=Copier if real else Tagger,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        loss=loss or LOSSES[name](),
        metrics=["mae"] if real else ["accuracy"],
    )
    return TorchReplica(spec, device="cpu", rank=rank, label_names=("tags",), label_shapes=[first.shape[1:]])


Outcome = tuple[dict[str, torch.Tensor], list[float], dict[str, float]]


def _train(worker: GangWorker, name: str) -> Outcome:
    replica = _replica(name, worker.rank)
    sync = attach(replica, worker)
    losses = []
    for step in range(STEPS):
        replica.train_step(_batch(name, step, worker.rank))
        merged = replica.merge_tallies(worker.all_gather(replica.take_tallies()))
        losses.append(merged["loss"])
    weights = {key: value.clone() for key, value in replica.model.state_dict().items()}
    for step in range(STEPS):
        replica.eval_step(_batch(name, step, worker.rank))
    figures = replica.merge_tallies(worker.all_gather(replica.take_tallies()))
    sync.close()
    return weights, losses, figures


def _batch(name: str, step: int, rank: int) -> Rows:
    x, y = _rows(step, CUT[rank], name in BY_VALUE)
    return Rows((x,), (y,), len(x), ROWS)


def _all(worker: GangWorker) -> dict[str, Outcome]:
    return {name: _train(worker, name) for name in LOSSES}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Outcome]]:
    """Every case, trained by one gang: starting processes is what takes time here."""
    return run_ranks(2, _all)


@pytest.mark.parametrize("name", LOSSES)
def test_padded_batches_train_as_one_process_does(name: str, trained: list[dict[str, Outcome]]) -> None:
    weights, losses = _reference(name)

    for found, found_losses, _ in (outcomes[name] for outcomes in trained):
        for key, wanted in weights.items():
            torch.testing.assert_close(found[key], wanted, atol=1e-6, rtol=1e-5)
        if name != "summed":
            assert found_losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("name", BY_TOKEN)
def test_figures_of_padded_batches_count_tokens_and_no_padding(
    name: str, trained: list[dict[str, Outcome]]
) -> None:
    model = Tagger()
    model.load_state_dict(trained[0][name][0])
    with torch.no_grad():
        pairs = [[torch.from_numpy(part) for part in _whole(name, step)] for step in range(STEPS)]
        guesses = [model(x).argmax(1) for x, _ in pairs]
    kept = sum(int((y != PAD).sum()) for _, y in pairs)
    right = sum(int(((g == y) & (y != PAD)).sum()) for g, (_, y) in zip(guesses, pairs, strict=True))

    assert trained[0][name][2]["num_samples"] == STEPS * ROWS
    if name != "own":  # a function says nothing of ignored targets
        assert trained[0][name][2]["accuracy"] == pytest.approx(right / kept)


def test_errors_of_values_count_every_value_once(trained: list[dict[str, Outcome]]) -> None:
    model = Copier()
    model.load_state_dict(trained[0]["mse"][0])
    with torch.no_grad():
        parts = [_rows(step, part, True) for step in range(STEPS) for part in CUT]
        errors = torch.cat([(model(torch.from_numpy(x)) - torch.from_numpy(y)).flatten() for x, y in parts])

    assert trained[0]["mse"][2]["mae"] == pytest.approx(errors.abs().mean().item(), rel=1e-5)
    assert trained[0]["mse"][2]["loss"] == pytest.approx(errors.square().mean().item(), rel=1e-5)


def _refused(worker: GangWorker) -> str:
    replica = _replica("cross-entropy", worker.rank, _own_mean)
    attach(replica, worker)
    if worker.rank == 0:
        return ""
    with pytest.raises(ConfigError) as error:
        replica.train_step(_batch("cross-entropy", 0, worker.rank))
    return str(error.value)


def test_a_mean_of_which_nobody_knows_what_it_is_over_is_refused_on_padded_batches() -> None:
    _, told = run_ranks(2, _refused)

    with pytest.raises(
        ConfigError, match=r"(?s)rows of 'tags' have shape .*returns a mean.*Hint.*not reduced"
    ):
        raise ConfigError(told)


def test_one_worker_takes_any_mean_on_padded_batches() -> None:
    replica = _replica("cross-entropy", 0, _own_mean)
    replica.train_step(Rows(*((part,) for part in _whole("cross-entropy", 0)), ROWS, ROWS))
    model = Tagger()
    x, y = (torch.from_numpy(part) for part in _whole("cross-entropy", 0))
    _own_mean(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()

    for mine, its in zip(replica.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, its)
