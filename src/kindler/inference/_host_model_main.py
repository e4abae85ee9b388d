"""The process that has the models of one GPU, and scores for the tasks of its host.

One thread computes, for all tasks: batches of a model that wait are scored in one go, so that on a GPU one is
copied while another is computed, whichever task it is of. Each task has a thread that reads and one that
writes, so that nobody waits for a task that takes its results slowly. See `host_model.py`.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import select
import socket
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kindler.engine.fork_server import peer_is_this_user
from kindler.engine.wire import Channel, accept
from kindler.frame import ChannelClosed
from kindler.frameworks.base import BaseReplica
from kindler.frameworks.contract import Scored
from kindler.frameworks.devices import explained
from kindler.inference.host_model import error_buffers, log_of, packed, unpacked

_MOST_RESIDENT = 4
_LOOK_S = 1.0
_USELESS_S = 10.0
_GREETING_S = 30.0
_LAST_WORDS_S = 5.0
_DOOMED = ("CUDA error", "device-side assert", "cudaError")  # after these, CUDA does nothing more here


def main() -> int:
    """Serve until nobody is left; returns the exit status."""
    order = json.loads(sys.stdin.buffer.read())
    sys.path.extend(path for path in order["sys_path"] if path not in sys.path)
    house = _House(
        socket.socket(fileno=order["listener"]),
        order["path"],
        secret=bytes.fromhex(order["secret"]),
        idle_s=order["idle_s"],
        gpu_only=order["mode"] == "auto",
        owner=order["owner"],
    )
    return house.run()


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    visitor: _Visitor
    recipe: Any


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    visitor: _Visitor
    arrays: tuple[np.ndarray[Any, Any], ...]


class _House:
    """All of it.

    Args:
        listener: Where tasks come.
        path: Its place, which is removed in the end.
        secret: What tasks know.
        idle_s: Seconds without a task until the end.
        gpu_only: Whether models that compute on the CPU are left to the tasks.
        owner: The process that the first task came from.
    """

    def __init__(
        self,
        listener: socket.socket,
        path: str,
        *,
        secret: bytes,
        idle_s: float,
        gpu_only: bool,
        owner: int,
    ) -> None:
        self._listener, self._path, self._secret, self._idle_s = listener, path, secret, idle_s
        self._gpu_only = gpu_only
        self._lock = threading.Lock()
        self._visitors: set[_Visitor] = set()
        self._owners: dict[int, int | None] = {}  # and what tells of their end
        self._quiet_since = time.monotonic()
        self._desk = _Desk(self)
        self.doomed = False
        self.watch(owner)

    def run(self) -> int:
        threading.Thread(target=self._desk.run, daemon=True, name="kindler-score").start()
        while not self._is_over():
            if _is_readable(self._listener.fileno(), _LOOK_S):
                self._welcome()
        ended_well = [] if self.doomed else [str(log_of(Path(self._path)))]
        for path in (self._path, *ended_well):
            try:
                os.unlink(path)
            except OSError:
                pass
        self._listener.close()
        self._wait_for_last_words()
        os._exit(1 if self.doomed else 0)  # frameworks have threads that would be waited for

    def watch(self, owner: int) -> None:
        """Stay as long as this process does."""
        with self._lock:
            if owner in self._owners:
                return
            handle: int | None = None
            if hasattr(os, "pidfd_open"):
                try:
                    handle = os.pidfd_open(owner)
                except ProcessLookupError:
                    return
                except OSError:
                    pass  # this kernel does not have it
            self._owners[owner] = handle

    def enter(self, visitor: _Visitor, key: str) -> bool:
        """A task wants a model, which stays as long as the task; whether it is there already."""
        with self._lock:
            visitor.key = key
            return key in self._desk.models

    def leave(self, visitor: _Visitor) -> None:
        with self._lock:
            self._visitors.discard(visitor)
            self._quiet_since = time.monotonic()

    def drop_unused(self, models: OrderedDict[str, BaseReplica], most: int) -> bool:
        """Forget models that no task has, oldest first, until so many are left; whether there were any."""
        before = len(models)
        with self._lock:
            used = {visitor.key for visitor in self._visitors}
            for key in [key for key in models if key not in used][: max(0, before - most)]:
                del models[key]
        return len(models) < before

    def keeps(self, model: BaseReplica) -> bool:
        """Whether a model that was loaded is worth sharing; if not, nobody needs this process for long."""
        if self._gpu_only and not _on_gpu(model):
            self._idle_s = min(self._idle_s, _USELESS_S)
            return False
        return True

    def put(self, job: _Load | _Batch) -> None:
        self._desk.jobs.put(job)

    def _welcome(self) -> None:
        sock, _ = self._listener.accept()
        if not peer_is_this_user(sock):
            sock.close()
            return
        visitor = _Visitor(self, sock)
        with self._lock:
            self._visitors.add(visitor)
        threading.Thread(target=visitor.read, args=(self._secret,), daemon=True).start()

    def _is_over(self) -> bool:
        with self._lock:
            for owner, handle in list(self._owners.items()):
                if _has_ended(owner, handle):
                    del self._owners[owner]
                    if handle is not None:
                        os.close(handle)
            idle = not self._visitors and time.monotonic() - self._quiet_since > self._idle_s
            return self.doomed or idle or not self._owners

    def _wait_for_last_words(self) -> None:
        """Tasks that were told of an error hear it before they hear that the process is gone."""
        until = time.monotonic() + _LAST_WORDS_S
        while self.doomed and self._visitors and time.monotonic() < until:
            time.sleep(0.01)


class _Visitor:
    """A task: its connection, and what is to be said to it.

    Attributes:
        key: The model that it uses.
        gone: Whether it has left.
    """

    def __init__(self, house: _House, sock: socket.socket) -> None:
        self._house, self._sock = house, sock
        self._answers: queue.SimpleQueue[tuple[str, list[Any], dict[str, Any]] | None] = queue.SimpleQueue()
        self.key = ""
        self.gone = False

    def read(self, secret: bytes) -> None:
        """Hear it out, on a thread of its own."""
        channel: Channel | None = None
        try:
            channel = accept(self._sock, secret, timeout_s=_GREETING_S)
            self._sock.settimeout(None)
            threading.Thread(target=self._write, args=(channel,), daemon=True).start()
            opened = channel.receive()
            self._house.watch(int(opened.fields["parent"]))
            recipe = None
            if not self._house.enter(self, str(opened.fields["key"])):
                self.say("send")
                recipe = unpacked(channel.receive())
            self._house.put(_Load(self, recipe))
            while True:
                self._house.put(_Batch(self, unpacked(channel.receive())))
        except (ChannelClosed, OSError):
            pass  # it has all that it wanted, or is gone
        except Exception:  # noqa: BLE001 - somebody who knows the secret and speaks another language
            traceback.print_exc()
        finally:
            self.gone = True
            self._answers.put(None)
            if channel is not None:
                channel.close()
            self._house.leave(self)

    def say(self, kind: str, buffers: list[Any] | None = None, **fields: Any) -> None:
        """Tell it something, without waiting until it listens."""
        self._answers.put((kind, buffers or [], fields))

    def fail(self, error: BaseException) -> None:
        """Tell it that what it wants cannot be."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.say("failed", list(error_buffers(error)), traceback=text)

    def _write(self, channel: Channel) -> None:
        while (answer := self._answers.get()) is not None:
            kind, buffers, fields = answer
            try:
                channel.send(kind, *buffers, **fields)
            except ChannelClosed:
                return


class _Desk:
    """Where models are loaded and batches computed, one thing at a time.

    Attributes:
        jobs: What is to be done.
        models: The models, the one that was used last at the end.
    """

    def __init__(self, house: _House) -> None:
        self._house = house
        self.jobs: queue.SimpleQueue[_Load | _Batch] = queue.SimpleQueue()
        self.models: OrderedDict[str, BaseReplica] = OrderedDict()
        self._next: _Load | _Batch | None = None

    def run(self) -> None:
        """Do what comes."""
        while True:
            job = self._next or self.jobs.get()
            self._next = None
            if isinstance(job, _Load):
                self._load(job)
            else:
                self._score(job)

    def _load(self, job: _Load) -> None:
        key = job.visitor.key
        try:
            with explained():
                model = self.models[key] if key in self.models else self._loaded(job.recipe)
        except BaseException as exc:  # noqa: BLE001 - the task raises it
            job.visitor.fail(exc)
            self._note(exc)
            return
        if self._house.keeps(model):
            self.models[key] = model
            self.models.move_to_end(key)
            self._house.drop_unused(self.models, _MOST_RESIDENT)
        job.visitor.say("ready", on_gpu=_on_gpu(model))

    def _loaded(self, recipe: Any) -> BaseReplica:
        try:
            loaded: BaseReplica = recipe.load()
        except Exception as exc:
            if "out of memory" not in str(exc).lower() or not self._house.drop_unused(self.models, 0):
                raise
            gc.collect()
            loaded = recipe.load()
        return loaded

    def _score(self, first: _Batch) -> None:
        """Compute a batch, and those of its model that come before something else does."""
        under_way: deque[_Batch] = deque()
        model = self.models.get(first.visitor.key)
        if model is None:
            first.visitor.fail(RuntimeError("the model was not loaded"))
            return
        try:
            with explained():
                for scored in model.predict_all(self._stream(first, model, under_way)):
                    _answer(under_way.popleft(), scored)
        except BaseException as exc:  # noqa: BLE001 - the task whose batch it was raises it
            self._note(exc)
            self._one_by_one(model, under_way, exc)

    def _stream(
        self, first: _Batch, model: BaseReplica, under_way: deque[_Batch]
    ) -> Iterator[tuple[np.ndarray[Any, Any], ...]]:
        job: _Batch | None = first
        while job is not None:
            if not job.visitor.gone:
                under_way.append(job)
                yield _own(job.arrays, model)
            job = self._following(first.visitor.key)

    def _following(self, key: str) -> _Batch | None:
        """The next batch of the same model, if it is there already: results of those before must not wait."""
        try:
            job = self.jobs.get_nowait()
        except queue.Empty:
            return None
        if isinstance(job, _Batch) and job.visitor.key == key:
            return job
        self._next = job
        return None

    def _one_by_one(self, model: BaseReplica, batches: deque[_Batch], error: BaseException) -> None:
        """One of several batches failed: find out which, so that only its task does."""
        for batch in batches:
            if self._house.doomed:
                batch.visitor.fail(error)
                continue
            try:
                with explained():
                    [scored] = model.predict_all([_own(batch.arrays, model)])
                _answer(batch, scored)
            except BaseException as exc:  # noqa: BLE001 - the task raises it
                self._note(exc)
                batch.visitor.fail(exc)

    def _note(self, error: BaseException) -> None:
        if any(words in f"{type(error).__name__} {error}" for words in _DOOMED):
            self._house.doomed = True


def _answer(batch: _Batch, scored: Scored) -> None:
    batch.visitor.say("scored", packed(scored))


def _own(arrays: tuple[np.ndarray[Any, Any], ...], model: BaseReplica) -> tuple[np.ndarray[Any, Any], ...]:
    """What came is read-only; most models may write to their inputs."""
    return arrays if model.takes_read_only else tuple(np.array(array) for array in arrays)


def _on_gpu(model: BaseReplica) -> bool:
    return bool(getattr(model, "on_gpu", False))


def _is_readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()  # unlike `select`, it takes descriptors of any number
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _has_ended(pid: int, handle: int | None) -> bool:
    if handle is not None:
        return _is_readable(handle, 0.0)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


if __name__ == "__main__":
    sys.exit(main())
