"""How a PyTorch model is trained, as a saved stage describes it: by names that are allowed, and no others."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from kindler import Estimator
from kindler.errors import ConfigError
from kindler.models.estimator import FrameworkKind
from kindler.models.registry import MODEL_KINDS

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "harmful", [{"optimizer": ["os", {}]}, {"others": {"log_dir": "/tmp"}}, {"others": {"model": 1}}]
)
def test_what_a_stage_cannot_have_been_saved_with_is_refused(harmful: dict[str, Any]) -> None:
    est = Estimator.from_torch(
        model=nn.Linear(2, 1),
        optimizer=functools.partial(torch.optim.Adam, lr=0.01),
        loss=nn.MSELoss(),
        metrics=["mae"],
        workers=2,
        seed=3,
    )
    kind = MODEL_KINDS.model_kind("torch")
    assert isinstance(kind, FrameworkKind)
    told = kind.describe_training(est)
    assert told is not None
    kind.training_options(told)

    with pytest.raises(ConfigError, match="the stage was saved with"):
        kind.training_options({**told, **harmful})
