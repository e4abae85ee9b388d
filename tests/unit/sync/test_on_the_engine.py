"""The group of numpy arrays on real workers of the local engine, without any framework."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kindler.config import RunSettings
from kindler.engine import local
from kindler.engine.job import Job, equal_ranks
from kindler.engine.worker import Worker
from kindler.sync.host_group import HostGroup


def mean(worker: Worker, settings: bytes) -> list[bytes]:
    """What the workers of this test run."""
    group = HostGroup(worker, timeout_s=30.0, **json.loads(settings))
    [result] = group.mean([np.full(4, worker.rank, np.float32)], 1.0 + worker.rank)
    group.close()
    return [result.tobytes()]


@pytest.mark.usefixtures("no_workers_left")
@pytest.mark.parametrize("shared_memory", [True, False])
def test_workers_of_an_engine_meet_in_memory_and_over_authenticated_links(shared_memory: bool) -> None:
    job = Job(
        ranks=equal_ranks(f"{__name__}:mean", 3),
        buffers=(json.dumps({"shared_memory": shared_memory}).encode(),),
        settings=RunSettings(idle_s=0),
    )

    outcomes = local.run(job, listener=lambda event: None)

    for outcome in outcomes:
        result = np.frombuffer(outcome.buffers[0], np.float32)
        np.testing.assert_allclose(result, np.full(4, (0 * 1 + 1 * 2 + 2 * 3) / 6), rtol=1e-6)
