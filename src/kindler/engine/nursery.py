"""Warm processes: a fork server per machine that has the framework imported and forks workers.

Importing a framework and what its first optimizer needs takes seconds; forking takes milliseconds.
So the first run on a machine starts a nursery, and every worker, of this run and the next, is a
fresh fork of it. The nursery itself computes nothing and starts no thread. It ends after `idle_s`
without a child, after a run that failed, with `close()`, and with its owner (the driver, or Spark's
Python daemon); its children end with it, and each ends with the supervisor that asked for it.

This module is the client's side; `_nursery_main.py` is the process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kindler.engine.channel import Channel, ChannelClosed, Frame
from kindler.errors import StartTimeoutError, TrainingError

__all__ = ["Child", "Recipe", "close", "retire", "start_child"]

_TRIES = 3
_MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit is 108 with the final NUL
_started: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a nursery has ready; runs with equal recipes share one.

    Attributes:
        preload: What to import or call before the first fork: "module" or "module:function".
        environment: Variables that must be set before anything is imported.
        idle_s: Seconds without a child after which it ends.
    """

    preload: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    idle_s: float = 300.0

    def key(self) -> str:
        words = [sys.executable, *self.preload, *map(str, self.environment), str(self.idle_s)]
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]


class Child:
    """A worker process: a channel to it, what it prints, and its end."""

    def __init__(self, *, pid: int, channel: Channel, output: IO[bytes], keeper: Channel) -> None:
        self.pid = pid
        self.channel = channel
        self.output = output
        self._keeper = keeper
        self._exit: Frame | None = None
        self._asking = threading.Lock()

    def kill(self) -> None:
        """End it now, with every process it started."""
        try:
            self._keeper.send("kill")
        except ChannelClosed:
            pass  # the nursery is gone, and its children with it

    def ask_for_stacks(self) -> None:
        """Have it write down what its threads do; it may be stuck."""
        try:
            self._keeper.send("stacks")
        except ChannelClosed:
            pass  # it is gone, and says no more

    def wait(self, timeout_s: float) -> tuple[int, bool]:
        """Its exit code (negative: a signal), and whether it ended by itself rather than by `kill`."""
        with self._asking:
            if self._exit is None:
                try:
                    self._exit = self._keeper.receive(timeout_s)
                except ChannelClosed:
                    self._exit = Frame("exit", {"code": -9, "by_itself": True})
        return int(self._exit.fields["code"]), bool(self._exit.fields["by_itself"])

    def close(self) -> None:
        """Let go of it; a child that still runs is ended by its nursery."""
        self._keeper.close()
        self.channel.close()
        self.output.close()


def start_child(
    recipe: Recipe,
    *,
    owner: int,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    debris: tuple[str, ...] = (),
) -> Child:
    """Fork a worker from the nursery of `recipe`, which is started first where there is none.

    Args:
        recipe: What must be ready in it.
        owner: The process that the nursery must not outlive.
        timeout_s: Seconds to wait, the nursery's own start included.
        environment: Variables of this child alone.
        debris: Folders to delete should the asking process be killed.
    """
    deadline = time.monotonic() + timeout_s
    for _ in range(_TRIES):
        keeper = _reach(recipe, owner)
        try:
            return _ask(keeper, environment or {}, debris, deadline)
        except ChannelClosed:
            keeper.close()  # it ended for idleness just as we came; the next one is ours
        except BaseException:
            keeper.close()
            raise
    raise TrainingError("the process that starts workers went away three times in a row.")


def close(owner: int | None = None) -> None:
    """End this owner's nurseries and their children (by default: those of this process)."""
    _tell_all(owner or os.getpid(), "end")
    for process in _started:
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _started.clear()
    shutil.rmtree(_folder(owner or os.getpid()), ignore_errors=True)


def retire(owner: int | None = None) -> None:
    """Let this owner's nurseries end with their last child: a run failed, the next starts afresh."""
    _tell_all(owner or os.getpid(), "retire")
    for process in _started:
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            pass  # another run still uses it
    _reap()


def _tell_all(owner: int, word: str) -> None:
    for path in sorted(_folder(owner).glob("*.sock")):
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(10.0)
                sock.connect(str(path))
                Channel(sock).send(word)
                sock.recv(1)  # closed: it has heard
        except OSError:
            path.unlink(missing_ok=True)


def _ask(keeper: Channel, environment: Mapping[str, str], debris: tuple[str, ...], deadline: float) -> Child:
    mine, theirs = socket.socketpair()
    reading, writing = os.pipe()
    output = os.fdopen(reading, "rb")
    try:
        with theirs:
            request = json.dumps({"environment": dict(environment), "debris": list(debris)}).encode()
            socket.send_fds(keeper_socket(keeper), [request], [theirs.fileno(), writing])
        os.close(writing)
        answer = keeper.receive(max(0.0, deadline - time.monotonic()))
        if answer.kind == "failed":
            raise TrainingError(f"a worker process could not be prepared:\n{answer.fields['traceback']}")
        return Child(pid=answer.fields["pid"], channel=Channel(mine), output=output, keeper=keeper)
    except BaseException as exc:
        mine.close()
        output.close()
        if isinstance(exc, TimeoutError):
            raise StartTimeoutError(
                "a worker process was not ready in time.\n"
                "Hint: the machine may be very busy; raise RunSettings(start_timeout_s=...)."
            ) from exc
        if isinstance(exc, OSError):
            raise ChannelClosed(str(exc)) from exc
        raise


def keeper_socket(keeper: Channel) -> socket.socket:
    """The raw socket: file descriptors travel beside frames, not in them."""
    return keeper._sock


def _reach(recipe: Recipe, owner: int) -> Channel:
    folder = _folder(owner)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{recipe.key()}.sock"
    with _locked(folder / f"{recipe.key()}.lock"):
        _reap()
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            _spawn(recipe, owner, path)
            sock.connect(str(path))
    return Channel(sock)


def _spawn(recipe: Recipe, owner: int, path: Path) -> None:
    _sweep(path.parent.parent)
    # The listener is made here, so that clients can queue at it while the nursery still imports.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(128)
        order: dict[str, Any] = {
            "listener": listener.fileno(),
            "path": str(path),
            "owner": owner,
            "preload": recipe.preload,
            "idle_s": recipe.idle_s,
            "sys_path": [p for p in sys.path if p],
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "kindler.engine._nursery_main", json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C at the terminal is the driver's to handle
            env={
                **_kept_memory(),
                **os.environ,
                **_quiet_threads(),
                **dict(recipe.environment),
                **_package_path(),
            },
        )
    _started.append(process)


def _quiet_threads() -> dict[str, str]:
    """Numeric libraries start thread pools on import, which do not survive a fork."""
    return {"OPENBLAS_NUM_THREADS": "1", "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}


def _kept_memory() -> dict[str, str]:
    """A step's tensors come and go by the megabyte; glibc keeps their pages rather than asking for zeroed
    ones each time, which costs a training step a tenth (TensorFlow) to a third (PyTorch) of its time.
    """
    return {
        "MALLOC_MMAP_THRESHOLD_": str(2**28),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        "MALLOC_ARENA_MAX": "1",  # the other arenas cannot hold large blocks
    }


def _package_path() -> dict[str, str]:
    """Where this very package is: the interpreter must find it before it has read its order."""
    root = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def _base() -> Path:
    base = Path(tempfile.gettempdir()) / f"kindler-{os.getuid()}"
    too_long = len(str(base).encode()) + 40 > _MAX_SOCKET_PATH_BYTES
    return Path("/tmp") / base.name if too_long else base


def _folder(owner: int) -> Path:
    return _base() / f"owner-{owner}"


def _sweep(base: Path) -> None:
    """Remove what killed owners left."""
    for folder in base.glob("owner-*"):
        if not _alive(int(folder.name.partition("-")[2])):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _reap() -> None:
    """Collect nurseries that ended for idleness, so that none stays behind as a zombie."""
    _started[:] = [process for process in _started if process.poll() is None]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
