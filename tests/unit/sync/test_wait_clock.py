"""A worker is marked while it waits for others, also when the wait ends badly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kindler.sync.wait_clock import Waiting


def test_the_worker_is_marked_while_the_block_runs_and_the_time_adds_up() -> None:
    worker = SimpleNamespace()
    waiting = Waiting(worker)
    with waiting:
        assert worker.waiting is True
    first = waiting.seconds

    assert worker.waiting is False
    with pytest.raises(TimeoutError), waiting:
        raise TimeoutError
    assert worker.waiting is False
    assert waiting.seconds >= first >= 0.0
