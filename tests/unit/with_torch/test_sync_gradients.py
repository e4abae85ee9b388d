"""The exchange of gradients during backward, against gradients of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gang import GangWorker, run_ranks
from torch import nn

from kindler.errors import SyncError
from kindler.frameworks.torch.exchange import GradientSync, TorchExchange

pytestmark = pytest.mark.torch

Grads = dict[str, torch.Tensor | None]


class Branches(nn.Module):
    """One path a flag: parameters of the others get no gradient; one is laid out by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(6, 5)
        self.left, self.right = nn.Linear(5, 1), nn.Linear(5, 1)
        self.never = nn.Linear(5, 1)
        self.double_width = nn.Linear(6, 5, dtype=torch.float64)
        self.common.weight.data = self.common.weight.data.t().contiguous().t()

    def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
        hidden = torch.tanh(self.common(x)) + self.double_width(x.double()).float()
        return getattr(self, side)(hidden)


def _model() -> Branches:
    torch.manual_seed(3)
    return Branches()


def _rows(rank: int) -> torch.Tensor:
    return torch.randn(rank + 2, 6, generator=torch.Generator().manual_seed(rank))


def _side(rank: int) -> str:
    return "right" if rank == 1 else "left"


def _grads(model: nn.Module) -> Grads:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def _together(ranks: Sequence[int]) -> Grads:
    model = _model()
    for rank in ranks:
        model(_rows(rank), _side(rank)).sum().backward()
    return _grads(model)


def _assert_same(found: Grads, expected: Grads, factor: float = 1.0) -> None:
    for name, wanted in expected.items():
        got = found[name]
        if wanted is None:
            assert got is None, name
        else:
            assert got is not None, name
            torch.testing.assert_close(got, wanted * factor, atol=1e-6, rtol=1e-5)


BUCKET_BYTES = (1, 64, 1 << 20)


def _all_sizes(worker: GangWorker, shared_memory: bool) -> list[dict[str, Grads]]:
    return [_steps(worker, shared_memory, bucket_bytes) for bucket_bytes in BUCKET_BYTES]


def _steps(worker: GangWorker, shared_memory: bool, bucket_bytes: int) -> dict[str, Grads]:
    group = TorchExchange(worker, device=torch.device("cpu"), timeout_s=60.0, shared_memory=shared_memory)
    model, found = _model(), {}
    sync = GradientSync(model.parameters(), group, first_bucket_bytes=bucket_bytes, bucket_bytes=bucket_bytes)
    rank = worker.rank

    def step(name: str) -> None:
        found[name] = _grads(model)
        for parameter in model.parameters():
            parameter.grad = None

    model(_rows(rank), _side(rank)).sum().backward()
    sync.finish()
    assert model.common.weight.grad is not None
    assert model.common.weight.grad.stride() == model.common.weight.stride()
    step("sum")
    if rank == 0:
        sync.idle()
    else:
        model(_rows(rank), _side(rank)).sum().backward()
        sync.finish()
    step("idle")
    with sync.paused():
        model(_rows(rank)[:1], _side(rank)).sum().backward()
    model(_rows(rank)[1:], _side(rank)).sum().backward()
    sync.finish()
    step("accumulated")
    sync.weigh(0.5 + rank)
    model(_rows(rank), _side(rank)).sum().backward()
    sync.finish()
    step("weighed")
    group.close()
    return found


@pytest.mark.parametrize(
    ("hosts", "shared_memory"),
    [(("a", "a"), True), (("a", "b"), True), (("a", "a", "b"), True), (("a", "a", "a"), False)],
)
def test_gradients_equal_those_of_one_process_whatever_the_buckets(
    hosts: Sequence[str], shared_memory: bool
) -> None:
    by_rank = run_ranks(len(hosts), _all_sizes, shared_memory, hosts=hosts)

    for results in zip(*by_rank, strict=True):
        _assert_all_same(results)


def _assert_all_same(results: Sequence[dict[str, Grads]]) -> None:
    everyone = range(len(results))
    for result in results:
        _assert_same(result["sum"], _together(everyone))
        _assert_same(result["idle"], _together(everyone[1:]))
        _assert_same(result["accumulated"], _together(everyone))
        _assert_same(result["weighed"], _together(everyone), 1 / sum(0.5 + rank for rank in everyone))
        for name, grads in result.items():
            for parameter, grad in grads.items():
                other = results[0][name][parameter]
                assert (grad is None) == (other is None)
                assert grad is None or torch.equal(grad, other)


def _alone() -> Any:
    return TorchExchange(
        type("Alone", (), {"rank": 0, "size": 1})(), device=torch.device("cpu"), timeout_s=1.0
    )


def test_a_second_backward_in_one_step_is_refused_rather_than_lost() -> None:
    model = nn.Linear(2, 1)
    GradientSync(model.parameters(), _alone())
    model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(SyncError, match="one backward per step"):
        model(torch.ones(1, 2)).sum().backward()


def test_sparse_gradients_become_dense_sums() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    sync = GradientSync(table.parameters(), _alone())
    table(torch.tensor([1, 1, 3])).sum().backward()
    sync.finish()

    assert table.weight.grad is not None
    assert table.weight.grad.tolist() == [[0, 0], [2, 2], [0, 0], [1, 1], [0, 0]]
