"""The client of a broker, without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kindler.errors import BrokerError
from kindler.runtime.broker import BrokerEngine
from kindler.runtime.messages import Report, Task, pack

TASK = Task(id="a", shelf="models", bucket="default", name="net@1", verb="predict", buffers=(b"", b""))


@pytest.mark.parametrize("arrives", [True, False])
def test_a_task_that_has_arrived_is_submitted_although_the_broker_does_not_say_so(
    arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, reports = BrokerEngine("memory:", "redis://nowhere"), list[Report]()
    done = Report("done", (b"result",))

    def send(_: Any) -> None:
        if arrives:
            body = pack(done.frame("a"))
            properties = {"correlation_id": "a"}
            engine._receive(
                SimpleNamespace(body=body, properties=properties, content_type="application/x-kindler-frame")
            )
        raise ConnectionResetError("the connection broke")

    monkeypatch.setattr(engine, "_send", send)
    if arrives:
        engine.submit(TASK, reports.append)
        assert reports == [done]
    else:
        with pytest.raises(BrokerError, match="cannot reach the broker: the connection broke"):
            engine.submit(TASK, reports.append)
        assert reports == []
    assert engine._pending == {}
    engine.close()
