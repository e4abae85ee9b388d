"""What the listener of a run hears, and in which order."""

from __future__ import annotations

from kindler.config import RunSettings
from kindler.engine.gang import watch
from kindler.engine.hub import Event, Hub
from kindler.engine.job import Job, equal_ranks
from kindler.engine.wire import connect

SECRET = b"s" * 32


def test_the_gang_is_told_of_before_any_report_however_fast_it_comes() -> None:
    settings = RunSettings()
    heard: list[str] = []
    with Hub(Job(ranks=equal_ranks("", 2), secret=SECRET, settings=settings)) as hub:
        channels = [connect(hub.address, SECRET, timeout_s=60) for _ in range(2)]

        def listen(event: Event) -> None:
            heard.append(event.fields.get("name", event.kind))
            if event.kind == "log":  # the rest happens while the watch is still busy with this line
                channels[1].send("hello", rank=1, host="h")
                for rank, channel in enumerate(channels):
                    channel.receive(60)
                    channel.send("report", name="steps", rank=rank)
                    channel.send("gather", b"", turn=0, wants="all")
                for channel in channels:
                    channel.receive(60)  # so the reports have come
                    channel.send("done")

        channels[0].send("hello", rank=0, host="h")
        channels[0].send("log", line="here I am")
        bad = watch(hub, running=lambda: not hub.finished, listener=listen, settings=settings)
        for channel in channels:
            channel.close()

    assert bad == []
    assert heard == ["log", "gang", "steps", "steps", "done", "done"]
