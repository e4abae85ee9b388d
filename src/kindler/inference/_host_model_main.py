"""The process that has the models of one GPU, and scores for the tasks of its host.

One thread computes for all tasks, and alone touches models; waiting batches of a model are scored in one go,
so that on a GPU one is copied while another is computed. The engine's server reads and writes for all of
them, so that nobody waits for a slow task. See `host_model.py`.
"""

from __future__ import annotations

import gc
import json
import math
import os
import queue
import socket
import sys
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kindler import limits
from kindler.engine.fork_server import peer_is_this_user
from kindler.engine.server import Handler, Peer, Server
from kindler.frame import Frame
from kindler.frameworks.base import BaseReplica
from kindler.frameworks.devices import explained
from kindler.inference.host_model import Arrays, error_buffers, log_of, packed, unpacked

_MOST_MODELS = 4
_CHECK_S = 1.0
_USELESS_S = 10.0
_FLUSH_S = 5.0
_MOST_TASKS = 256  # that connect at the same time
_FATAL = ("CUDA error", "device-side assert", "cudaError")  # after these, CUDA does nothing more here


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """Rows to score; without them a model to load, by a recipe unless it was loaded already."""

    task: Peer
    arrays: Arrays | None = None
    recipe: Frame | None = None


class _HostModels(Handler):
    """Ends when the processes that tasks came from have ended, and after some time without a task."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._path, self._idle_s = Path(order["path"]), order["idle_s"]
        self._gpu_only = order["mode"] == "auto"  # models that compute on the CPU are left to the tasks
        self._tasks: dict[Peer, str] = {}  # and the key of the model that each uses
        self._owners = {int(order["owner"])}  # processes that tasks came from
        self._checked = self._idle_since = time.monotonic()
        self._models: OrderedDict[str, BaseReplica] = OrderedDict()  # the one that was used last at the end
        self._next: _Job | None = None
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._unusable = False
        self._server = Server(
            socket.socket(fileno=order["listener"]),
            bytes.fromhex(order["secret"]),
            self,
            expected=_MOST_TASKS,
            name="kindler-host-model",
            timeout_s=limits.TASK_GREETING_S,
            send_s=math.inf,  # a task may be slow with its rows
            leaves_large=True,
        )

    def run(self) -> None:
        self._server.start()
        while not self._unusable:
            job = self._next or self._jobs.get()
            self._next = None
            self._load(job) if job.arrays is None else self._score(job)
        self._path.unlink(missing_ok=True)
        self._server.drain(_FLUSH_S)  # tasks hear of an error before they hear that the process is gone
        os._exit(1)

    def received(self, peer: Peer, frame: Frame) -> None:
        if frame.kind == "open":
            if not peer_is_this_user(peer.sock):
                raise ValueError("it belongs to another user")
            peer.id = self._tasks[peer] = frame.fields["key"]
            self._owners.add(frame.fields["parent"])
            self._jobs.put(_Job(peer))
        elif frame.kind == "recipe":
            self._jobs.put(_Job(peer, recipe=frame))
        else:
            self._jobs.put(_Job(peer, arrays=unpacked(frame)))

    def closed(self, peer: Peer, why: str) -> None:
        self._tasks.pop(peer, None)
        self._idle_since = time.monotonic()

    def tick(self, now: float) -> None:
        if now - self._checked < min(_CHECK_S, self._idle_s):
            return
        self._checked = now
        self._owners = {owner for owner in self._owners if _is_running(owner)}
        idle = not self._tasks and now - self._idle_since > self._idle_s
        if idle or not self._owners:
            for path in (self._path, log_of(self._path)):
                with suppress(OSError):
                    path.unlink()
            os._exit(0)  # frameworks have threads that would be waited for

    def _load(self, job: _Job) -> None:
        key = job.task.id
        model = self._models.get(key)
        if model is None:
            if job.recipe is None:
                job.task.send("send")
                return
            try:
                with explained():
                    model = self._loaded(unpacked(job.recipe))
            except BaseException as exc:  # noqa: BLE001 - the task raises it
                self._fail(job.task, exc)
                return
        on_gpu = bool(getattr(model, "on_gpu", False))
        if self._gpu_only and not on_gpu:
            self._idle_s = min(self._idle_s, _USELESS_S)  # the model is not worth sharing
        else:
            self._models[key] = model
            self._models.move_to_end(key)
            self._drop_unused(_MOST_MODELS)
        job.task.send("ready", on_gpu=on_gpu)

    def _loaded(self, recipe: Any) -> BaseReplica:
        try:
            loaded: BaseReplica = recipe.load()
        except Exception as exc:
            if "out of memory" not in str(exc).lower() or not self._drop_unused(0):
                raise
            gc.collect()
            loaded = recipe.load()
        return loaded

    def _drop_unused(self, most: int) -> bool:
        before, used = len(self._models), list(self._tasks.values())
        for key in [key for key in self._models if key not in used][: max(0, before - most)]:
            del self._models[key]
        return len(self._models) < before

    def _score(self, first: _Job) -> None:
        under_way: deque[_Job] = deque()
        model = self._models.get(first.task.id)
        if model is None:
            self._fail(first.task, RuntimeError("the model was not loaded"))
            return
        try:
            with explained():
                for scored in model.predict_all(self._stream(first, model, under_way)):
                    under_way.popleft().task.send("scored", *packed(scored))
        except BaseException as exc:  # noqa: BLE001 - the task whose batch it was raises it
            self._note(exc)
            self._one_by_one(model, under_way, exc)

    def _stream(self, first: _Job, model: BaseReplica, under_way: deque[_Job]) -> Iterator[Arrays]:
        job: _Job | None = first
        while job is not None:
            if job.task in self._tasks:
                under_way.append(job)
                yield _writable(job, model)
            job = self._following(first.task.id)

    def _following(self, key: str) -> _Job | None:
        """Only if it is there already: earlier results must not wait."""
        try:
            job = self._jobs.get_nowait()
        except queue.Empty:
            return None
        if job.arrays is not None and job.task.id == key:
            return job
        self._next = job
        return None

    def _one_by_one(self, model: BaseReplica, batches: deque[_Job], error: BaseException) -> None:
        """One of several batches failed: rerun them singly, so that only its task fails."""
        for batch in batches:
            if self._unusable:
                self._fail(batch.task, error)
                continue
            try:
                with explained():
                    [scored] = model.predict_all([_writable(batch, model)])
                batch.task.send("scored", *packed(scored))
            except BaseException as exc:  # noqa: BLE001 - the task raises it
                self._fail(batch.task, exc)

    def _fail(self, task: Peer, error: BaseException) -> None:
        self._note(error)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        task.send("failed", *error_buffers(error), traceback=text)

    def _note(self, error: BaseException) -> None:
        if any(words in f"{type(error).__name__} {error}" for words in _FATAL):
            self._unusable = True


def _writable(job: _Job, model: BaseReplica) -> Arrays:
    """Most models may write to their inputs; a batch that is rerun must be what it was."""
    arrays = job.arrays or ()
    return arrays if model.takes_read_only else tuple(np.array(array) for array in arrays)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


if __name__ == "__main__":
    received = json.loads(sys.stdin.buffer.read())
    sys.path.extend(path for path in received["sys_path"] if path not in sys.path)
    _HostModels(received).run()
