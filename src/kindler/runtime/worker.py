"""The process that runs tasks, one after the other, over the socket that it was forked with (see `local.py`).

It ends when it has been idle for a while, when the other side closes the connection, and with its owner.
"""

from __future__ import annotations

import faulthandler
import os
import socket
from pathlib import Path

from kindler.engine.placement import enter_program_path
from kindler.engine.wire import Channel
from kindler.errors import DataError
from kindler.frame import ChannelClosed
from kindler.runtime import value_codec
from kindler.runtime.executor import Executor
from kindler.runtime.local import Log, send_frame
from kindler.runtime.messages import Report, Task
from kindler.runtime.sandboxed_model import Encoded


def main(sock: socket.socket) -> int:
    """Run tasks until idle; the first message has the store, the limits, and where to write the log."""
    faulthandler.enable()
    channel = Channel(sock)
    try:
        order = channel.receive().fields
        log = Log(Path(order["folder"]))
        log.take_over()
        enter_program_path(order["sys_path"])
        # So that `from kindler import om` in the user's code opens the store that it came from.
        os.environ["KINDLER_STORE"] = order["store"]
        executor = Executor(order["store"], capacity=order["capacity"], trusted=order["trusted"])
        channel.send("ready")
        while True:
            task = Task.read(channel.receive(order["idle_s"]))
            log.begin()
            send_frame(channel, Report("running").frame(task.id))
            send_frame(channel, _reported(executor, task, log).frame(task.id))
    except (ChannelClosed, TimeoutError):
        return 0


def _reported(executor: Executor, task: Task, log: Log) -> Report:
    try:
        result = executor.run(task)
        if isinstance(result, Encoded):
            value, buffers = result.value, result.buffers
        else:
            value, encoded = value_codec.encode(result)
            buffers = tuple(encoded)
        size = sum(map(len, buffers))
        if size > task.result_bytes:
            raise DataError(
                f"the result of {task} has {size} bytes, more than result_bytes={task.result_bytes}.\n"
                "Hint: predict fewer rows at a time, or raise runtime.options(result_bytes=...)."
            )
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # noqa: BLE001 - the edge of the worker, also for code that calls sys.exit
        return Report.failed(exc, log=log.tail())
    return Report("done", value, buffers, log=log.tail())
