"""One copy of a model for all tasks of a host: a process per GPU loads it and scores for them.

Otherwise each Spark task, a process of its own, would load the model onto the GPU. The first task starts the
process. Tasks of the same program (both sides prove that they know its secret) send it batches over a socket
in a folder of this user's alone. It ends with the Spark Python daemons that its tasks came from, and after
some minutes without tasks. Its side is `_host_model_main.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from kindler.engine.fork_server import leave_running, package_path, socket_folder
from kindler.engine.placement import FRUGAL, VISIBLE_GPUS, TaskPlace, machine_gpus
from kindler.engine.wire import Channel, connect
from kindler.errors import ConfigError, TrainingError
from kindler.frame import ChannelClosed, Frame
from kindler.frameworks.contract import Scored
from kindler.temporary import locked

if TYPE_CHECKING:
    from kindler.inference.predictor import Recipe

VARIABLE = "KINDLER_HOST_MODEL"
MODES = ("auto", "always", "never")
IN_FLIGHT = 8  # batches of a task; more than a scorer takes before it gives back the first
_FOLDER = "models"
_GREETING_S = 60.0
_TRIES = 3
_IDLE_S = 300.0
_TAIL = 2000  # characters of its log

Arrays = tuple[np.ndarray[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Tasks and process prove `secret` to each other. Mode "auto" shares models that compute on a GPU."""

    secret: bytes = field(repr=False)
    mode: str = "auto"
    idle_s: float = _IDLE_S


@lru_cache(maxsize=1)
def _secret(process: int) -> bytes:
    return secrets.token_bytes(32)


def sharing() -> Sharing | None:
    """As `KINDLER_HOST_MODEL` says; None if models are not shared."""
    mode = os.environ.get(VARIABLE) or "auto"
    if mode not in MODES:
        raise ConfigError(f"{VARIABLE} must be one of {', '.join(MODES)}; received {mode!r}.")
    return None if mode == "never" else Sharing(_secret(os.getpid()), mode)


def gpu_of(device: str, place: TaskPlace, mode: str) -> str | None:
    """The GPU whose process a task uses; "" is the CPU's process, None means none."""
    kind, _, number = device.partition(":")
    gpus = [] if kind not in ("auto", "cuda") else list(place.gpus) or _machine_gpus()
    if not gpus:
        return "" if mode == "always" and kind in ("auto", "cpu") else None
    if not number:
        return gpus[place.number % len(gpus)]
    return gpus[int(number)] if number.isdecimal() and int(number) < len(gpus) else None


@lru_cache(maxsize=1)
def _machine_gpus() -> list[str]:
    return machine_gpus()


class HostModel:
    def __init__(self, channel: Channel, *, on_gpu: bool, log: Path) -> None:
        self._channel, self._log, self.on_gpu = channel, log, on_gpu
        self._under_way = 0  # batches without an answer

    @classmethod
    def reached(cls, recipe: Recipe, sharing: Sharing, gpu: str) -> HostModel:
        own = replace(recipe, device=recipe.device.partition(":")[0], threads=None)
        path = _socket_of(sharing, gpu)
        for _ in range(_TRIES):
            channel = _connected(path, sharing, gpu)
            if channel is None:
                continue
            try:
                return cls._opened(channel, own, log_of(path))
            except ChannelClosed:  # it ended for idleness just as we came; the next one is ours
                channel.close()
            except BaseException:
                channel.close()
                raise
        raise TrainingError(
            "the process that has the model for all tasks of this host ended three times before it had"
            f" loaded it{_log_tail(log_of(path))}.\n"
            f"Hint: {VARIABLE}=never, set where the program runs, makes each task load its own model."
        )

    @classmethod
    def _opened(cls, channel: Channel, recipe: Recipe, log: Path) -> HostModel:
        channel.send("open", key=recipe.key, parent=os.getppid())
        answer = channel.receive()
        if answer.kind == "send":
            # Modules that came with the program to this host are found by this process's own path.
            paths = (*recipe.sys_path, *(path for path in sys.path if path))
            channel.send("recipe", *packed(replace(recipe.whole(), sys_path=paths)))
            answer = channel.receive()
        if answer.kind == "failed":
            raise _error(answer)
        return cls(channel, on_gpu=bool(answer.fields["on_gpu"]), log=log)

    def predict_all(self, batches: Iterable[Arrays]) -> Iterator[Scored]:
        while self._under_way:  # what came after a batch that failed
            self._answer()
        for batch in batches:
            with self._reporting_end():
                self._channel.send("batch", *packed(batch))
            self._under_way += 1
            if self._under_way == IN_FLIGHT:
                yield self._scored()
        while self._under_way:
            yield self._scored()

    def close(self) -> None:
        self._channel.close()

    def _answer(self) -> Frame:
        with self._reporting_end():
            answer = self._channel.receive()
        self._under_way -= 1
        return answer

    def _scored(self) -> Scored:
        answer = self._answer()
        if answer.kind == "failed":
            raise _error(answer)
        scored: Scored = unpacked(answer)
        return scored

    @contextmanager
    def _reporting_end(self) -> Iterator[None]:
        try:
            yield
        except ChannelClosed as exc:
            raise TrainingError(
                "the process that has the model for all tasks of this host ended in the middle of a batch"
                f"{_log_tail(self._log)}. It may have used up the memory of the machine."
            ) from exc


def packed(value: Any) -> list[Any]:
    """Arrays are not copied. Only between processes that have authenticated each other."""
    buffers: list[pickle.PickleBuffer] = []
    head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [head, *(buffer.raw() for buffer in buffers)]


def unpacked(frame: Frame) -> Any:
    """Arrays are read-only."""
    return pickle.loads(frame.buffers[0], buffers=frame.buffers[1:])


class _RemoteTraceback(Exception):
    """The traceback of the other process."""


def _error(answer: Frame) -> Exception:
    error: Exception = unpacked(answer)
    error.__cause__ = _RemoteTraceback(f"\n{answer.fields['traceback']}")
    return error


def _socket_of(sharing: Sharing, gpu: str) -> Path:
    facts = [sharing.secret, gpu.encode(), sys.executable.encode()]
    name = hashlib.sha256(b"\0".join(facts)).hexdigest()[:24]
    return socket_folder(_FOLDER) / f"{name}.sock"


def log_of(path: Path) -> Path:
    """Not the task's own log, whose reader would wait until this process ends as well."""
    return path.with_suffix(".log")


def _log_tail(log: Path) -> str:
    try:
        text = log.read_text(errors="replace").strip()
    except OSError:
        return ""
    return f"; it said:\n{text[-_TAIL:]}\n" if text else ""


def _connected(path: Path, sharing: Sharing, gpu: str) -> Channel | None:
    """None if the process went away just now."""
    with locked(path.parent / ".lock"):
        if not _listens(path):
            _sweep(path.parent)
            _spawn(path, sharing, gpu)
    try:
        channel = connect((str(path), 0), sharing.secret, timeout_s=_GREETING_S)
    except ChannelClosed:
        return None
    channel.socket.settimeout(None)  # whoever takes long with its rows may; a process that ended is noticed
    return channel


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return False
    return True


def _sweep(folder: Path) -> None:
    for path in folder.glob("*.sock"):
        if not _listens(path):
            path.unlink(missing_ok=True)
            log_of(path).unlink(missing_ok=True)


def _spawn(path: Path, sharing: Sharing, gpu: str) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, log_of(path).open("wb") as log:
        # Made here, so that tasks can queue at it while the process still imports.
        listener.bind(str(path))
        listener.listen(128)
        order = {
            "listener": listener.fileno(),
            "path": str(path),
            "secret": sharing.secret.hex(),
            "idle_s": sharing.idle_s,
            "mode": sharing.mode,
            "owner": os.getppid(),
            "sys_path": [p for p in sys.path if p],
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "kindler.inference._host_model_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # signals to the group of Spark's Python workers are not for it
            env={**FRUGAL, **os.environ, **package_path(), VISIBLE_GPUS: gpu},
        )
        assert process.stdin is not None
        with suppress(OSError), process.stdin as inlet:  # not as an argument, which everybody could read
            inlet.write(json.dumps(order).encode())
    leave_running(process)


def error_buffers(error: BaseException) -> Sequence[Any]:
    try:
        buffers = packed(error)
        pickle.loads(buffers[0], buffers=buffers[1:])
    except Exception:  # noqa: BLE001 - classes of exceptions may do anything when they are packed
        return packed(RuntimeError(f"{type(error).__name__}: {error}"))
    return buffers
