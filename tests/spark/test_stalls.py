"""A run on Spark whose workers all live while none gets any further, wherever the workers meet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

from kindler import Estimator, RunSettings
from kindler.callbacks import Callback
from kindler.errors import StalledError

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]


class Sleeper(Callback):
    def on_step_end(self, run: Any) -> None:
        if run.rank == 1 and run.step == 3:
            threading.Event().wait()


@pytest.mark.parametrize("rendezvous", ["driver", "workers"])
def test_a_rank_that_is_stuck_is_named_with_the_line_it_is_at(
    partitioned: Callable[..., Any], rendezvous: Literal["driver", "workers"]
) -> None:
    rows = [([i / 64, 1.0], i / 64) for i in range(64)]
    data = partitioned([rows[:20], rows[20:]], "features array<float>, label float")
    est = Estimator.from_torch(
        model=nn.Linear(2, 1),
        optimizer=torch.optim.Adam,
        loss=nn.MSELoss(),
        workers=2,
        # A worker that waits for a busy core must not count as stuck.
        settings=RunSettings(stall_timeout_s=12.0, rendezvous=rendezvous),
    )

    with pytest.raises(StalledError, match=r"threading\.Event\(\)\.wait\(\)") as caught:
        est.fit(data, epochs=2, batch_size=8, callbacks=[Sleeper()], verbose=0)

    assert caught.value.ranks == (1,)
    assert sorted(caught.value.stacks) == [0, 1]
