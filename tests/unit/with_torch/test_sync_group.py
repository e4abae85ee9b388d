"""The buckets of torch's exchange, between real processes; gradients are in another file."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
from gang import GangWorker, run_ranks

from kindler.errors import SyncError
from kindler.frameworks.torch.exchange import TorchExchange, bound_store

pytestmark = pytest.mark.torch


def _exchange(worker: GangWorker, shared_memory: bool = True, timeout_s: float = 60.0) -> TorchExchange:
    return TorchExchange(worker, device=torch.device("cpu"), timeout_s=timeout_s, shared_memory=shared_memory)


def _sum(exchange: TorchExchange, values: torch.Tensor) -> torch.Tensor:
    [bucket] = exchange.buckets([(values.numel(), values.dtype)])
    bucket.begin()
    bucket.fill.copy_(values)
    bucket.launch()
    bucket.push(block=True)
    bucket.wait()
    return bucket.result.clone()


def _twice(worker: GangWorker) -> list[float]:
    sums = []
    for turn in range(2):
        exchange = _exchange(worker, shared_memory=bool(turn))
        sums.append(_sum(exchange, torch.tensor([float(worker.rank + turn)])).item())
        exchange.close()
        exchange.close()
    assert not torch.distributed.is_initialized()
    return sums


def test_a_second_exchange_works_after_the_first_is_closed_and_none_is_torchs_default() -> None:
    assert run_ranks(2, _twice) == [[1.0, 3.0], [1.0, 3.0]]


def test_one_worker_needs_nobody() -> None:
    worker: Any = type("Alone", (), {"rank": 0, "size": 1})()
    exchange = _exchange(worker)

    assert _sum(exchange, torch.tensor([2.0, 3.0])).tolist() == [2.0, 3.0]
    exchange.close()


def _left_alone(worker: GangWorker) -> str:
    exchange = _exchange(worker, shared_memory=False, timeout_s=1.0)
    if worker.rank == 1:
        return "gone"
    with pytest.raises(SyncError, match="connection to worker 1 broke in an exchange between hosts"):
        _sum(exchange, torch.ones(3))
    return "told"


def test_a_lost_peer_on_the_network_is_a_sync_error() -> None:
    assert run_ranks(2, _left_alone) == ["told", "gone"]


def test_the_store_that_nccl_meets_at_is_bound_to_the_address_in_use() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = bound_store("127.0.0.1", port, timedelta(seconds=10), listener)
    other = bound_store("127.0.0.1", port, timedelta(seconds=10), None)
    store.set("key", "value")

    assert other.get("key") == b"value"
    mine = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
    assert [place.ip for place in mine if place.port == port] == ["127.0.0.1"]
