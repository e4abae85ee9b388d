"""The fork server process: `python -m kindler.engine._fork_server_main ORDER`. See `fork_server.py`.

A connection requests one child and stays open as its leash: closing it kills the child, and the child's exit
code comes back over it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kindler import limits
from kindler.engine.fork_server import flush_output, peer_is_this_user
from kindler.engine.wire import Channel
from kindler.frame import ChannelClosed, Frame
from kindler.temporary import sweep

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_IOLBF = 1  # of C's stdio: a line at a time
_opened_by = ""  # what was being preloaded when this process first used a GPU
_ACCELERATORS = ("/dev/nvidia-uvm", "/dev/kfd")  # what CUDA and ROCm open when they are first asked anything


@dataclass(slots=True)
class _Leash:
    channel: Channel
    sock: socket.socket
    pid: int | None = None
    killed: bool = False


def main(order: dict[str, Any]) -> None:
    sys.path.extend(path for path in order["sys_path"] if path not in sys.path)
    listener = socket.socket(fileno=order["listener"])
    before, late = dict(os.environ), order.get("late", False)
    failure = None if late else _preload(order["preload"])
    if not late and holds_accelerator():
        # Become a process that has imported nothing: whatever opened the device is imported in each fork.
        late_order = {**order, "late": True, "opened_by": _opened_by or order["preload"][-1]}
        os.execv(
            sys.executable, [sys.executable, "-m", "kindler.engine._fork_server_main", json.dumps(late_order)]
        )
    variables = {name: value for name, value in os.environ.items() if before.get(name) != value}
    server = _ForkServer(listener, order, failure, variables)
    Path(order["path"]).with_suffix(".starting").unlink(missing_ok=True)
    try:
        server.run()
    finally:
        server.retire()
        _sweep_for(limits.SWEEP_S if server.end() else 0.0)


def _preload(names: list[str]) -> str | None:
    global _opened_by
    try:
        for name in names:
            module, _, function = name.partition(":")
            loaded = importlib.import_module(module)
            if function:
                getattr(loaded, function)()
            if not _opened_by and holds_accelerator():
                _opened_by = name
    except BaseException:  # noqa: BLE001 - whatever it is, those who ask for a child get the traceback
        return traceback.format_exc()
    # What was imported lives as long as the process: children need not look through it for garbage,
    # which would also copy every page of it.
    gc.collect()
    gc.freeze()
    return None


def holds_accelerator(devices: tuple[str, ...] = _ACCELERATORS) -> bool:
    """Whether this process has opened a GPU, which then does not work in its forks."""
    folder = "/proc/self/fd"
    for fd in os.listdir(folder) if os.path.isdir(folder) else []:
        try:
            if os.readlink(f"{folder}/{fd}").startswith(devices):
                return True
        except OSError:
            pass  # the listing's own descriptor, closed since
    return False


class _ForkServer:
    def __init__(
        self,
        listener: socket.socket,
        order: dict[str, Any],
        failure: str | None,
        variables: dict[str, str],
    ) -> None:
        self._listener = listener
        self._order = order
        self._failure = failure
        self._variables = variables  # set by what was imported
        self._leashes: dict[int, _Leash] = {}
        self._owner: int | None = order["owner"]
        self._owner_fd: int | None = None
        self._owner_has_ended = False
        self._runs: set[str] = set()  # that have had workers here
        self._adoptable_until = 0.0
        self._selector = selectors.DefaultSelector()
        self._ended = False
        self._retired = False
        self._quiet_since = time.monotonic()
        self._sweep_until = 0.0

    def run(self) -> None:
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_w, False)
        os.set_blocking(wake_r, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._welcome)
        self._selector.register(wake_r, selectors.EVENT_READ, lambda: os.read(wake_r, 4096))
        self._watch_owner()
        while not self._ended:
            for key, _ in self._selector.select(limits.OWNER_CHECK_S):
                key.data()
            self._collect()
            self._check_the_time()
            if time.monotonic() < self._sweep_until:
                sweep()

    def retire(self) -> None:
        if not self._retired:
            self._retired = True
            Path(self._order["path"]).unlink(missing_ok=True)
            self._selector.unregister(self._listener)
            self._listener.close()

    def end(self) -> int:
        left = list(self._leashes.values())
        for leash in left:
            self._drop(leash)
        return len(left)

    def _watch_owner(self) -> None:
        if hasattr(os, "pidfd_open") and self._owner is not None:
            try:
                self._owner_fd = os.pidfd_open(self._owner)
            except OSError:
                self._ended = True
                return
            self._selector.register(self._owner_fd, selectors.EVENT_READ, self._note_end_of_owner)

    def _note_end_of_owner(self) -> None:
        self._owner_has_ended = True  # the connections that have news as well are heard first

    def _lose_owner(self) -> None:
        """End, with all children, unless an executor of Spark has died: the next one can use this process."""
        # A child's supervisor, which dies with the owner, may be noticed first.
        abruptly = self.end() > 0 or time.monotonic() < self._sweep_until
        self._ended = self._retired or not (self._order["adoptable"] and abruptly)
        self._owner_has_ended = False
        self._owner, self._adoptable_until = None, time.monotonic() + limits.ADOPTION_S
        if self._owner_fd is not None:
            self._selector.unregister(self._owner_fd)
            os.close(self._owner_fd)
            self._owner_fd = None

    def _serve_another(self, owner: int, path: str, run: str) -> bool:
        # Another program's may have other code under the same names.
        if self._owner is not None or self._ended or run not in self._runs:
            return False
        os.rename(self._order["path"], path)
        self._order["path"], self._owner = path, owner
        self._quiet_since = time.monotonic()
        self._watch_owner()
        return True

    def _check_the_time(self) -> None:
        if self._owner is None:
            self._ended = self._ended or time.monotonic() >= self._adoptable_until
            return
        try:
            os.kill(self._owner, 0)
        except ProcessLookupError:
            self._owner_has_ended = True
        except PermissionError:
            pass
        if self._owner_has_ended:
            self._lose_owner()
            return
        if self._leashes:
            self._quiet_since = time.monotonic()
        elif self._retired or time.monotonic() - self._quiet_since >= max(
            self._order["idle_s"], limits.OWNER_CHECK_S
        ):
            self._ended = True

    def _welcome(self) -> None:
        sock, _ = self._listener.accept()
        if not peer_is_this_user(sock):
            sock.close()
            return
        leash = _Leash(Channel(sock), sock)
        self._leashes[sock.fileno()] = leash
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear(leash))

    def _hear(self, leash: _Leash) -> None:
        if leash.pid is None:
            self._first_message(leash)
            return
        try:
            kind = leash.channel.receive(0).kind
            if kind == "stacks" and not _has_ended(leash.pid):
                os.kill(leash.pid, signal.SIGUSR1)
            elif kind == "kill":
                leash.killed = leash.killed or _kill_group(leash.pid)
        except ChannelClosed:
            self._drop(leash)

    def _first_message(self, leash: _Leash) -> None:
        fds: list[int] = []
        try:
            _, fds, _, _ = socket.recv_fds(leash.sock, 1, 2)
            leash.sock.settimeout(limits.FORK_REQUEST_S)
            request = leash.channel.receive(limits.FORK_REQUEST_S)
        except (OSError, ValueError):  # it went away, or is not one of ours
            _close_all(fds)
            self._drop(leash)
            return
        if not fds:
            self._obey(request, leash.channel)
            self._drop(leash)
            return
        if self._failure is not None:
            _close_all(fds)
            leash.channel.send("failed", traceback=self._failure)
            self._drop(leash)
            self._ended = True
            return
        try:
            pid = os.fork()
        except OSError:  # no more processes, or too little memory: the client asks again
            _close_all(fds)
            self._drop(leash)
            return
        if pid == 0:
            self._become_child(request.fields, *fds)
            return
        _close_all(fds)
        self._runs.add(request.fields["run"])
        leash.pid = pid
        try:
            leash.channel.send("forked", pid=pid)
        except ChannelClosed:
            self._drop(leash)

    def _obey(self, order: Frame, asked_by: Channel) -> None:
        if order.kind == "end":
            self._ended = True
        elif order.kind == "retire":
            self.retire()
        elif order.kind == "adopt" and self._serve_another(**order.fields):
            with suppress(ChannelClosed):  # it has died as well
                asked_by.send("adopted")

    def _become_child(self, surroundings: dict[str, Any], control: int, output: int) -> None:
        status = 1
        try:
            _set_up_process()
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor ends us
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a job, and a place for stacks
            for leash in self._leashes.values():
                leash.sock.close()
            self._listener.close()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            _print_by_the_line()
            _take_over(surroundings, self._variables)
            if self._order.get("late"):
                self._import_late()
            module, _, function = surroundings["entry"].partition(":")
            status = getattr(importlib.import_module(module), function)(socket.socket(fileno=control))
        except BaseException:  # noqa: BLE001 - the edge of the process
            traceback.print_exc()
        finally:
            # Interpreter shutdown would run the framework's own teardown, which may hang.
            flush_output()
            os._exit(status)

    def _import_late(self) -> None:
        sys.stderr.write(
            f"importing {self._order['opened_by']!r} opens a GPU, and CUDA does not work in forks of such a"
            " process: this worker imports everything itself, which takes longer.\n"
        )
        if failure := _preload(self._order["preload"]):
            raise ImportError(failure)

    def _collect(self) -> None:
        for leash in list(self._leashes.values()):
            if leash.pid is None or not _has_ended(leash.pid):
                continue
            _kill_group(leash.pid)  # what the child started itself
            code = os.waitstatus_to_exitcode(os.waitpid(leash.pid, 0)[1])
            leash.pid = None
            try:
                leash.channel.send("exit", code=code, by_itself=not leash.killed)
            except ChannelClosed:
                pass  # nobody is interested any more
            self._forget(leash)

    def _drop(self, leash: _Leash) -> None:
        """Kill the child of a client that is gone, and sweep the files it can no longer delete."""
        if leash.pid is not None:
            _kill_group(leash.pid)
            os.waitpid(leash.pid, 0)
            self._sweep_until = time.monotonic() + limits.SWEEP_S
        self._forget(leash)

    def _forget(self, leash: _Leash) -> None:
        self._leashes.pop(leash.sock.fileno(), None)
        try:
            self._selector.unregister(leash.sock)
        except (KeyError, ValueError):
            pass
        leash.channel.close()


def _sweep_for(seconds: float) -> None:
    """Remove files left by killed processes; clients of the fork server may still be exiting."""
    deadline = time.monotonic() + seconds
    while True:
        sweep()
        if time.monotonic() >= deadline:
            return
        time.sleep(limits.OWNER_CHECK_S)


def _take_over(surroundings: dict[str, Any], variables: dict[str, str]) -> None:
    """Adopt the client's current environment rather than the one the fork server was started with."""
    os.environ.clear()
    os.environ.update({**variables, **surroundings["environment"]})
    time.tzset()
    tempfile.tempdir = None  # it may have been looked up with other variables
    if surroundings["umask"] is not None:
        os.umask(surroundings["umask"])
    try:
        if surroundings["cwd"] is not None:
            os.chdir(surroundings["cwd"])
        if surroundings["cpus"] is not None:
            os.sched_setaffinity(0, surroundings["cpus"])
    except OSError:
        pass  # the folder is gone, or the machine's CPUs have changed


def _has_ended(pid: int) -> bool:
    """Whether an unreaped child has ended; its pid stays reserved."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(pid: int) -> bool:
    alive = not _has_ended(pid)
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # already gone, or not yet its own group
    return alive


def _set_up_process() -> None:
    """Die with the fork server, and wake on time from short sleeps: workers wait for each other in those."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_PR_SET_TIMERSLACK, 1)


def _print_by_the_line() -> None:
    """Line-buffer output, so that a killed process loses no printed line."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if sys.platform == "linux":  # what C and C++ print has a buffer of its own
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
