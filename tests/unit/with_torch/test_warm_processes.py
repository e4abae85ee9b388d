"""Warm processes of runs end when asked, and after their idle time."""

from __future__ import annotations

import pytest

from kindler import RunSettings
from kindler.engine import fork_server
from tests.conftest import eventually_none, fork_servers
from tests.torch.test_failures import X, Y, regression

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]


def test_warm_processes_end_when_asked_and_after_their_idle_time() -> None:
    regression().fit((X, Y), verbose=0)
    assert fork_servers()
    fork_server.close()
    assert not eventually_none(fork_servers)

    regression(settings=RunSettings(idle_s=0)).fit((X, Y), verbose=0)
    assert not eventually_none(fork_servers)
