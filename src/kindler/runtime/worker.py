"""The process that runs tasks, one after the other. Started by `processes.py`.

It ends when it has been idle for a while, when the other side closes the connection, and with its owner.
"""

from __future__ import annotations

import json
import os

from kindler.engine.wire import Channel, connect
from kindler.engine.worker import Worker
from kindler.frame import ChannelClosed
from kindler.runtime import value_codec
from kindler.runtime.executor import Executor
from kindler.runtime.logs import Log
from kindler.runtime.messages import Report, Task, described
from kindler.runtime.sandboxed_model import Encoded

_CONNECT_TIMEOUT_S = 60.0


def serve(worker: Worker, order: bytes) -> list[bytes]:
    """Run tasks until idle; `order` is JSON with the store, the limits and the port to report to."""
    settings = json.loads(order)
    log = Log(worker.scratch)
    log.take_over()
    # So that `from kindler import om` in the user's code opens the store that it came from.
    os.environ["KINDLER_STORE"] = settings["store"]
    executor = Executor(settings["store"], capacity=settings["capacity"], trusted=settings["trusted"])
    channel = connect(("127.0.0.1", settings["port"]), worker.secret, timeout_s=_CONNECT_TIMEOUT_S)
    try:
        while True:
            task = Task.read(channel.receive(settings["idle_s"]))
            log.begin()
            _send(channel, task, Report("running"))
            _send(channel, task, _reported(executor, task, log))
    except (ChannelClosed, TimeoutError):
        return []
    finally:
        channel.close()


def _reported(executor: Executor, task: Task, log: Log) -> Report:
    try:
        result = executor.run(task)
        if isinstance(result, Encoded):
            return Report("done", result.value, result.buffers, log=log.tail())
        value, buffers = value_codec.encode(result)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # noqa: BLE001 - the edge of the worker, also for code that calls sys.exit
        return Report("failed", error=described(exc), log=log.tail())
    return Report("done", value, tuple(buffers), log=log.tail())


def _send(channel: Channel, task: Task, report: Report) -> None:
    frame = report.frame(task.id)
    channel.send(frame.kind, *frame.buffers, **frame.fields)
