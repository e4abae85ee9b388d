"""The process that has the models of one GPU, and scores for the tasks of its host.

One thread computes for all tasks; waiting batches of a model are scored in one go, so that on a GPU one is
copied while another is computed. Each task has a reading and a writing thread, so that nobody waits for a
slow task. See `host_model.py`.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from kindler.engine.fork_server import peer_is_this_user
from kindler.engine.wire import Channel, accept
from kindler.frame import ChannelClosed
from kindler.frameworks.base import BaseReplica
from kindler.frameworks.devices import explained
from kindler.inference.host_model import Arrays, error_buffers, log_of, packed, unpacked

_MOST_MODELS = 4
_POLL_S = 1.0
_USELESS_S = 10.0
_GREETING_S = 30.0
_FLUSH_S = 5.0
_FATAL = ("CUDA error", "device-side assert", "cudaError")  # after these, CUDA does nothing more here


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """Rows to score; without `arrays` a model to load, by a recipe unless it was loaded already."""

    client: _Client
    recipe: Any = None
    arrays: Arrays | None = None


class _Server:
    """Ends when the processes that tasks came from have ended, and after some time without a task."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._listener = socket.socket(fileno=order["listener"])
        self._path, self._idle_s = Path(order["path"]), order["idle_s"]
        self._secret = bytes.fromhex(order["secret"])
        self._gpu_only = order["mode"] == "auto"  # models that compute on the CPU are left to the tasks
        self._lock = threading.Lock()
        self._clients: set[_Client] = set()
        self._owners = {int(order["owner"])}  # processes that tasks came from
        self._idle_since = time.monotonic()
        self._models: OrderedDict[str, BaseReplica] = OrderedDict()  # the one that was used last at the end
        self._next: _Job | None = None
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.unusable = False

    def run(self) -> None:
        threading.Thread(target=self._compute, daemon=True, name="kindler-score").start()
        while not self._is_over():
            if wait([self._listener], _POLL_S):
                self._accept()
        for path in (self._path, *([] if self.unusable else [log_of(self._path)])):
            with suppress(OSError):
                path.unlink()
        self._listener.close()
        until = time.monotonic() + _FLUSH_S
        while self.unusable and self._clients and time.monotonic() < until:
            time.sleep(0.01)  # tasks hear of an error before they hear that the process is gone
        os._exit(1 if self.unusable else 0)  # frameworks have threads that would be waited for

    def enter(self, client: _Client, key: str, owner: int) -> bool:
        """Register a task's model, which stays as long as the task; returns whether it is loaded."""
        with self._lock:
            client.key = key
            self._owners.add(owner)
            return key in self._models

    def leave(self, client: _Client) -> None:
        with self._lock:
            self._clients.discard(client)
            self._idle_since = time.monotonic()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        if not peer_is_this_user(sock):
            sock.close()
            return
        client = _Client(self, sock)
        with self._lock:
            self._clients.add(client)
        threading.Thread(target=client.read, args=(self._secret,), daemon=True).start()

    def _is_over(self) -> bool:
        with self._lock:
            self._owners = {owner for owner in self._owners if _is_running(owner)}
            idle = not self._clients and time.monotonic() - self._idle_since > self._idle_s
            return self.unusable or idle or not self._owners

    def _compute(self) -> None:
        while True:
            job = self._next or self.jobs.get()
            self._next = None
            self._load(job) if job.arrays is None else self._score(job)

    def _load(self, job: _Job) -> None:
        key = job.client.key
        try:
            with explained():
                model = self._models[key] if key in self._models else self._loaded(job.recipe)
        except BaseException as exc:  # noqa: BLE001 - the task raises it
            job.client.fail(exc)
            self._note(exc)
            return
        on_gpu = bool(getattr(model, "on_gpu", False))
        if self._gpu_only and not on_gpu:
            self._idle_s = min(self._idle_s, _USELESS_S)  # the model is not worth sharing
        else:
            self._models[key] = model
            self._models.move_to_end(key)
            self._drop_unused(_MOST_MODELS)
        job.client.say("ready", on_gpu=on_gpu)

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
        before = len(self._models)
        with self._lock:
            used = {client.key for client in self._clients}
            for key in [key for key in self._models if key not in used][: max(0, before - most)]:
                del self._models[key]
        return len(self._models) < before

    def _score(self, first: _Job) -> None:
        under_way: deque[_Job] = deque()
        model = self._models.get(first.client.key)
        if model is None:
            first.client.fail(RuntimeError("the model was not loaded"))
            return
        try:
            with explained():
                for scored in model.predict_all(self._stream(first, model, under_way)):
                    under_way.popleft().client.say("scored", packed(scored))
        except BaseException as exc:  # noqa: BLE001 - the task whose batch it was raises it
            self._note(exc)
            self._one_by_one(model, under_way, exc)

    def _stream(self, first: _Job, model: BaseReplica, under_way: deque[_Job]) -> Iterator[Arrays]:
        job: _Job | None = first
        while job is not None:
            if not job.client.gone:
                under_way.append(job)
                yield _writable(job, model)
            job = self._following(first.client.key)

    def _following(self, key: str) -> _Job | None:
        """Only if it is there already: earlier results must not wait."""
        try:
            job = self.jobs.get_nowait()
        except queue.Empty:
            return None
        if job.arrays is not None and job.client.key == key:
            return job
        self._next = job
        return None

    def _one_by_one(self, model: BaseReplica, batches: deque[_Job], error: BaseException) -> None:
        """One of several batches failed: rerun them singly, so that only its task fails."""
        for batch in batches:
            if self.unusable:
                batch.client.fail(error)
                continue
            try:
                with explained():
                    [scored] = model.predict_all([_writable(batch, model)])
                batch.client.say("scored", packed(scored))
            except BaseException as exc:  # noqa: BLE001 - the task raises it
                self._note(exc)
                batch.client.fail(exc)

    def _note(self, error: BaseException) -> None:
        if any(words in f"{type(error).__name__} {error}" for words in _FATAL):
            self.unusable = True


class _Client:
    def __init__(self, server: _Server, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self._answers: queue.SimpleQueue[tuple[str, list[Any], dict[str, Any]] | None] = queue.SimpleQueue()
        self.key = ""
        self.gone = False

    def read(self, secret: bytes) -> None:
        """Receive the model and batches, on a thread of its own."""
        channel: Channel | None = None
        try:
            channel = accept(self._sock, secret, timeout_s=_GREETING_S)
            self._sock.settimeout(None)
            threading.Thread(target=self._write, args=(channel,), daemon=True).start()
            opened = channel.receive()
            recipe = None
            if not self._server.enter(self, opened.fields["key"], opened.fields["parent"]):
                self.say("send")
                recipe = unpacked(channel.receive())
            self._server.jobs.put(_Job(self, recipe=recipe))
            while True:
                self._server.jobs.put(_Job(self, arrays=unpacked(channel.receive())))
        except (ChannelClosed, OSError):
            pass  # it has all that it wanted, or is gone
        except Exception:  # noqa: BLE001 - somebody who knows the secret and speaks another language
            traceback.print_exc()
        finally:
            self.gone = True
            self._answers.put(None)
            if channel is not None:
                channel.close()
            self._server.leave(self)

    def say(self, kind: str, buffers: list[Any] | None = None, **fields: Any) -> None:
        """Does not wait until the task reads it."""
        self._answers.put((kind, buffers or [], fields))

    def fail(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.say("failed", list(error_buffers(error)), traceback=text)

    def _write(self, channel: Channel) -> None:
        while (answer := self._answers.get()) is not None:
            kind, buffers, fields = answer
            try:
                channel.send(kind, *buffers, **fields)
            except ChannelClosed:
                return


def _writable(job: _Job, model: BaseReplica) -> Arrays:
    """Received arrays are read-only, but most models may write to their inputs."""
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
    _Server(received).run()
