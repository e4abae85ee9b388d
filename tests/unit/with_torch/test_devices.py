"""Scales of gradients, and GPUs of ranks, in replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import RunSettings
from kindler.errors import ConfigError
from kindler.frameworks.torch.fully_sharded import _check_own_gpus
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from kindler.group import Group
from tests.torch.test_devices import X, Y, network
from tests.unit.with_torch.rows import batch

pytestmark = pytest.mark.torch


def replica(**options: Any) -> TorchReplica:
    spec = TorchSpec(
        model=network, optimizer=torch.optim.Adam, loss=nn.MSELoss(), precision="fp16", **options
    )
    return TorchReplica(spec, device="cpu", seed=3)


def test_a_gradient_that_does_not_fit_moves_nothing_and_halves_the_scale_which_a_state_keeps() -> None:
    one = replica()
    one.begin_epoch(1)
    one.train_step(batch(X, Y))
    before, scale = one.read(), one._scaler.get_scale()

    one.train_step(batch(X * 1e9, Y))

    for kept, now in zip(before, one.read(), strict=True):
        np.testing.assert_array_equal(kept, now)
    assert one._scaler.get_scale() == scale / 2
    other = replica()
    other.load_state(one.state())
    assert other._scaler.get_scale() == scale / 2


def test_gradients_for_other_syncs_are_not_scaled_and_one_that_does_not_fit_is_not_applied() -> None:
    exact = TorchReplica(
        TorchSpec(model=network, optimizer=torch.optim.Adam, loss=nn.MSELoss()), device="cpu", seed=3
    )
    half = replica()
    for one in (exact, half):
        one.begin_epoch(1)
    for found, wanted in zip(
        half.gradients(batch(X, Y * 0.1)).arrays, exact.gradients(batch(X, Y * 0.1)).arrays, strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=0.02, atol=1e-3)

    before = half.read()
    half.apply([np.full_like(array, np.inf) for array in before])
    for kept, now in zip(before, half.read(), strict=True):
        np.testing.assert_array_equal(kept, now)


def test_workers_that_share_a_gpu_are_refused_where_each_needs_its_own() -> None:
    _check_own_gpus([b"here 1", b"here 2", b"there 1"])
    with pytest.raises(ConfigError, match="3 workers share 2 GPUs, and each needs its own"):
        _check_own_gpus([b"here 1", b"here 2", b"here 1"])


def test_one_copy_of_the_parameters_is_refused_where_they_are_not_in_the_machines_memory() -> None:
    replica = TorchReplica(TorchSpec(model=network()), device="meta")
    with pytest.raises(ConfigError, match="one_copy=True, but the parameters are on meta"):
        replica.fuse(Group(), RunSettings(), "zero1", divide=None, one_copy=True)
