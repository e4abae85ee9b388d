"""Warm processes: one fork server per machine has the framework imported and forks workers.

Importing a framework takes seconds, forking milliseconds. A fork server computes nothing and starts no
thread. It ends after `idle_s` without a child, with `close()`, and with its owner (the
driver, or Spark's Python daemon); its children end with it, and each ends with its supervisor. If an executor
of Spark dies while it has children, it waits some seconds for another executor on its machine.

A fork takes over the client's environment, folder, umask and time zone; variables that libraries read on
import are part of the fork server's key instead. The socket lies in a folder private to this user, and both
sides check the peer's user id. This is the client; `_fork_server_main.py` is the process.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kindler import limits
from kindler.engine.wire import Channel
from kindler.errors import StartTimeoutError, TrainingError
from kindler.frame import ChannelClosed, Frame
from kindler.temporary import locked, private_folder

_TRIES = 3
_READ_BYTES = 64 << 10
_MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit is 108 with the final NUL
_STARTING = ".starting"
_REQUEST, _WORD = b"+", b"-"  # the first byte says what follows: a request with its descriptors, or a word
_started: list[subprocess.Popen[bytes]] = []
_left_running: list[subprocess.Popen[Any]] = []

# What interpreters, numeric libraries and frameworks read once, when they are loaded.
_READ_EARLY = (
    *("PYTHON", "LD_", "DYLD_", "MALLOC_", "GLIBC_", "LANG", "LC_", "HOME", "PROTOCOL_BUFFERS_", "ARROW_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "VECLIB_", "NPY_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "HSA_", "ZE_", "ONEDNN_", "DNNL_"),
    *("TORCH", "PYTORCH_", "ATEN_", "TRITON_", "TF_", "XLA_", "JAX", "KERAS_", "TPU_", "JE_ARROW_"),
)
# Of those, what libraries set themselves when they are imported, in this process at any time.
_SET_BY_LIBRARIES = frozenset(
    (
        *("KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR"),
        *("TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION"),
    )
)
_OF_SPARKS_DAEMON = "PYTHON_WORKER_FACTORY_"  # how its workers prove themselves, other for each executor


class RequestCancelledError(Exception):
    """The client no longer wants the child."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    # What to import or call before the first fork: "module" or "module:function".
    preload: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()  # variables that must be set before anything is imported
    idle_s: float = 300.0  # seconds without a child after which it ends
    # The variables of this process that it and its children have; None is all of them.
    inherits: tuple[str, ...] | None = None

    def inherited(self) -> dict[str, str]:
        return {
            name: value
            for name, value in os.environ.items()
            if self.inherits is None or name in self.inherits
        }

    def key(self) -> str:
        early = {
            name: value
            for name, value in self.inherited().items()
            if name.startswith(_READ_EARLY)
            and name not in _SET_BY_LIBRARIES
            and not name.startswith(_OF_SPARKS_DAEMON)
        }
        early.update(self.environment)
        words = [sys.executable, *self.preload, str(self.idle_s), *map(str, sorted(early.items()))]
        if self.inherits is not None:
            words += ["inherits", *self.inherits]
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]


class Child:
    def __init__(self, *, pid: int, channel: Channel, output: IO[bytes], keeper: Channel) -> None:
        self.pid = pid
        self.channel = channel
        self.output = output
        self._keeper = keeper
        self._exit: Frame | None = None
        self._asking = threading.Lock()

    def kill(self) -> None:
        try:
            self._keeper.send("kill")
        except ChannelClosed:
            pass  # the fork server is gone, and its children with it

    def ask_for_stacks(self) -> None:
        """Make it write its threads' stacks to its scratch folder, even if it is stuck."""
        try:
            self._keeper.send("stacks")
        except ChannelClosed:
            pass  # it is gone, and says no more

    def wait(self, timeout_s: float) -> tuple[int, bool]:
        """Return its exit code (negative for a signal), and whether it ended without `kill`."""
        with self._asking:
            if self._exit is None:
                try:
                    self._exit = self._keeper.receive(timeout_s)
                except ChannelClosed:
                    self._exit = Frame("exit", {"code": -9, "by_itself": True})
        return int(self._exit.fields["code"]), bool(self._exit.fields["by_itself"])

    def close(self) -> None:
        self._keeper.close()
        self.channel.close()
        self.output.close()


def start_child(
    recipe: Recipe,
    *,
    owner: int,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    wanted: Callable[[], bool] = lambda: True,
    entry: str = "kindler.engine.worker:run_child",
    run: str = "",
) -> Child:
    """Fork a worker from the fork server of `recipe`, starting one if necessary.

    `owner` is the process the fork server must not outlive, `wanted` is polled and cancels the request, and
    `entry` names the function that gets the child's end of `Child.channel` and returns the exit status. `run`
    is whose worker it is: a run may go on with the fork server of an executor that it has lost.
    """
    deadline = time.monotonic() + timeout_s
    for _ in range(_TRIES):
        keeper = _reach(recipe, owner, run)
        try:
            surroundings = {**_surroundings(recipe, environment or {}), "entry": entry, "run": run}
            return _ask(keeper, surroundings, wanted, deadline)
        except ChannelClosed:
            keeper.close()  # it ended for idleness just as we came, or a fork failed
        except BaseException:
            keeper.close()
            raise
    raise TrainingError(
        "the process that starts workers ended, or could start none, three times in a row.\n"
        "Hint: is there enough memory, and does the machine allow more processes (ulimit -u)?"
    )


def close(owner: int | None = None) -> None:
    owner = owner or os.getpid()
    _tell_all(owner, "end")
    for process in _started:
        try:
            process.wait(limits.FORK_ANSWER_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its children end with it
            process.wait()
    _started.clear()
    shutil.rmtree(_folder(owner), ignore_errors=True)


def retire(owner: int | None = None) -> None:
    """Let this owner's fork servers end with their last child, so that the next run starts afresh."""
    answered = _tell_all(owner or os.getpid(), "retire")
    for process in _started:
        try:
            process.wait(limits.WAKE_S if answered else 0.0)
        except subprocess.TimeoutExpired:
            pass  # another run still uses it
    _reap()


def _tell_all(owner: int, word: str) -> bool:
    """Tell every fork server; return whether all heard. One that is still importing is killed."""
    folder = _folder(owner)
    _end_starting(folder)
    answered = True
    for path in sorted(folder.glob("*.sock")):
        try:
            with _connect(path) as sock:
                sock.sendall(_WORD)
                Channel(sock).send(word)
                sock.settimeout(limits.FORK_ANSWER_S)
                sock.recv(1)  # closed: it has answered
        except (OSError, ChannelClosed) as exc:
            path.unlink(missing_ok=True)  # nobody shall reach it again
            answered = answered and not isinstance(exc, TimeoutError)
    return answered


def _end_starting(folder: Path) -> None:
    for path in folder.glob(f"*{_STARTING}"):
        try:
            pid = int(path.read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if str(path.with_suffix(".sock")).encode() in command:  # not another process of that number
                os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError):
            pass  # it is gone, or done with importing
        path.unlink(missing_ok=True)


def _surroundings(recipe: Recipe, environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        folder: str | None = os.getcwd()
    except FileNotFoundError:
        folder = None
    return {
        "environment": {**recipe.inherited(), **dict(recipe.environment), **environment},
        "cwd": folder,
        "umask": _umask(),
        "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }


def _umask() -> int | None:
    """Read from /proc: setting and resetting it would affect other threads."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1], 8) for line in lines if line.startswith("Umask:")), None)


def _ask(
    keeper: Channel, surroundings: Mapping[str, Any], wanted: Callable[[], bool], deadline: float
) -> Child:
    mine, theirs = socket.socketpair()
    reading, writing = os.pipe()
    output = os.fdopen(reading, "rb")
    try:
        try:
            with theirs:
                socket.send_fds(keeper.socket, [_REQUEST], [theirs.fileno(), writing])
        finally:
            os.close(writing)
        keeper.send("fork", **surroundings)
        answer = _answer(keeper, wanted, deadline)
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


def _answer(keeper: Channel, wanted: Callable[[], bool], deadline: float) -> Frame:
    while wanted():
        left = deadline - time.monotonic()
        try:
            return keeper.receive(max(0.0, min(limits.POLL_S, left)))
        except TimeoutError:
            if left <= 0:
                raise
    raise RequestCancelledError


def _reach(recipe: Recipe, owner: int, run: str) -> Channel:
    folder = _folder(owner)
    folder.mkdir(mode=0o700, exist_ok=True)
    key = recipe.key()
    path = folder / f"{key}.sock"
    with locked(folder / f"{key}.lock"):
        _reap()
        try:
            sock = _connect(path)
        except OSError:
            path.unlink(missing_ok=True)
            if not _adopt(path, owner, run):
                _spawn(recipe, owner, path)
            sock = _connect(path)
    return Channel(sock)


def _adopt(path: Path, owner: int, run: str) -> bool:
    """Take over the fork server of an executor that has died with workers of this run."""
    for other in path.parent.parent.glob(f"owner-*/{path.name}"):
        if _alive(int(other.parent.name.partition("-")[2])):
            continue
        try:
            with _connect(other) as sock:
                sock.settimeout(limits.FORK_ANSWER_S)
                sock.sendall(_WORD)
                channel = Channel(sock)
                channel.send("adopt", owner=owner, path=str(path), run=run)
                if channel.receive(limits.FORK_ANSWER_S).kind == "adopted":
                    return True
        except (OSError, ChannelClosed):
            pass  # it ends, or another one was quicker
    return False


def _connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(str(path))
        if not peer_is_this_user(sock):
            raise ConnectionRefusedError(f"{path} belongs to another user")
    except BaseException:
        sock.close()
        raise
    return sock


def peer_is_this_user(sock: socket.socket) -> bool:
    """Whether the other end of a local socket belongs to this user, where the system can tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the folder that the socket lies in is this user's alone
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())


def _spawn(recipe: Recipe, owner: int, path: Path) -> None:
    _sweep(path.parent.parent)
    # The listener is made here, so that clients can queue at it while the fork server still imports.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(128)
        order: dict[str, Any] = {
            "listener": listener.fileno(),
            "path": str(path),
            "owner": owner,
            "adoptable": owner != os.getpid(),
            "preload": recipe.preload,
            "idle_s": recipe.idle_s,
            "sys_path": [p for p in sys.path if p],
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "kindler.engine._fork_server_main", json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C at the terminal is the driver's to handle
            env={
                **_kept_memory(),
                **recipe.inherited(),
                **_quiet_threads(),
                **dict(recipe.environment),
                **package_path(),
            },
        )
    path.with_suffix(_STARTING).write_text(str(process.pid))
    _started.append(process)
    leave_running(process)  # it ends with its owner, which need not be this process


def _quiet_threads() -> dict[str, str]:
    """Keep numeric libraries and Arrow's allocator from starting threads, which do not survive a fork."""
    allocator = filter(None, [os.environ.get("JE_ARROW_MALLOC_CONF"), "background_thread:false"])
    return {
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": ",".join(allocator),
        "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",
    }


def _kept_memory() -> dict[str, str]:
    """Make glibc keep the pages of tensors that come and go by the megabyte; fetching zeroed pages each
    time costs a training step a tenth (TensorFlow) to a third (PyTorch) of its time.
    """
    return {
        "MALLOC_MMAP_THRESHOLD_": str(2**28),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        "MALLOC_ARENA_MAX": "1",  # the other arenas cannot hold large blocks
    }


def package_path() -> dict[str, str]:
    """Let the interpreter find this package before it has read its order."""
    root = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def _base() -> Path:
    parent = Path(tempfile.gettempdir())
    too_long = len(str(parent).encode()) + 60 > _MAX_SOCKET_PATH_BYTES
    return private_folder(Path("/tmp") if too_long else parent)


def socket_folder(name: str) -> Path:
    """A folder private to this user for sockets, whose paths must be short."""
    folder = _base() / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _folder(owner: int) -> Path:
    return _base() / f"owner-{owner}"


def _sweep(base: Path) -> None:
    for folder in base.glob("owner-*"):
        pid = folder.name.partition("-")[2]
        if pid.isdecimal() and not _alive(int(pid)) and not any(map(_listens, folder.glob("*.sock"))):
            shutil.rmtree(folder, ignore_errors=True)


def _listens(path: Path) -> bool:
    try:
        _connect(path).close()
    except OSError:
        return False
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _reap() -> None:
    _started[:] = [process for process in _started if process.poll() is None]


class PrintedLines:
    def __init__(self, output: IO[bytes], tell: Callable[[str], None]) -> None:
        self._output = output
        self._tell = tell
        self._rest = bytearray()  # of a line whose end has not come
        self._reading = threading.Lock()

    def pump(self) -> None:
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        more = True
        while more:
            poll.poll(1000 * limits.WAKE_S)
            with self._reading:  # asked again: `catch_up` may have been faster
                if self._output.closed:
                    return
                if poll.poll(0):
                    more = self._read(_READ_BYTES) > 0
        self.catch_up()

    def catch_up(self) -> None:
        """Pass on everything written before this call, including an unfinished line."""
        with self._reading:
            left = 0 if self._output.closed else self._waiting()
            while left > 0 and (size := self._read(min(left, _READ_BYTES))):
                left -= size
            if self._rest:
                self._tell(_text(self._rest))
                self._rest.clear()

    def close(self) -> None:
        """Pass on the rest and close the pipe, which `pump` notices."""
        self.catch_up()
        with self._reading:
            self._output.close()

    def _waiting(self) -> int:
        (count,) = struct.unpack("i", fcntl.ioctl(self._output, termios.FIONREAD, bytes(4)))
        return int(count)

    def _read(self, limit: int) -> int:
        data = os.read(self._output.fileno(), limit)
        self._rest += data
        if b"\n" in data:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                self._tell(_text(line))
        return len(data)


def print_line(line: str) -> None:
    """Print a line in one write: Java may write to the same pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001 - a closed one, or one of the user's own
            continue


def _text(line: bytearray) -> str:
    return line.decode(errors="replace")


def leave_running(process: subprocess.Popen[Any]) -> None:
    """Neither wait for a process nor let Python warn that it still runs: only its `Popen` can reap it."""
    _left_running[:] = [one for one in _left_running if one.poll() is None]
    _left_running.append(process)


@atexit.register
def _say_nothing() -> None:
    for process in _left_running:
        process.poll()
        if process.returncode is None:
            process.returncode = 0  # `Popen.__del__` looks at this alone
