"""A process that has one model in memory, is locked in, and runs its verbs. The worker's side is
`locked_model.py`."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from kindler import jail
from kindler.engine.wire import Channel
from kindler.errors import DataError
from kindler.frame import ChannelClosed, Frame
from kindler.models.loaded import LoadedModel, load_files
from kindler.runtime import value_codec
from kindler.runtime.messages import Report, described


def main(sock: socket.socket) -> int:
    """Serve until the worker is gone; returns the exit status."""
    channel = Channel(sock)
    try:
        order = channel.receive()
        model, report = _loaded(order, sock)
        _send(channel, report)
        while model is not None:
            _send(channel, _called(model, channel.receive(), order.fields["answer_bytes"]))
    except ChannelClosed:
        pass
    return 0


def _loaded(order: Frame, sock: socket.socket) -> tuple[LoadedModel | None, Report]:
    folder = Path(order.fields["folder"])
    try:
        os.chdir("/")
        jail.limit(order.fields["memory_bytes"])
        jail.enter([folder], keep=(sock.fileno(),))
        made = load_files(order.fields["model_kind"], folder, order.fields["meta"], trusted=False)
    except BaseException as exc:  # noqa: BLE001 - the edge of the process: the worker is told
        return None, Report("failed", error=described(exc))
    return made, Report("done")


def _called(model: LoadedModel, frame: Frame, most: int) -> Report:
    try:
        data, options = value_codec.decode(frame.fields["arguments"], frame.buffers)
        value, buffers = value_codec.encode(model.call(frame.fields["verb"], *data, **options))
        size = sum(map(len, buffers))
        if size > most:
            raise DataError(
                f"the result takes {size} bytes; a worker takes {most} of a model that is not trusted.\n"
                "Hint: predict fewer rows at a time."
            )
    except BaseException as exc:  # noqa: BLE001 - whatever a model raises is told to whoever sent the task
        return Report("failed", error=described(exc))
    return Report("done", value, tuple(buffers))


def _send(channel: Channel, report: Report) -> None:
    frame = report.frame("")
    channel.send(frame.kind, *frame.buffers, **frame.fields)
