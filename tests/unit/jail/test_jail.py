"""A process that is locked in, tried from the inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kindler import jail

lacking = jail.lacking()
pytestmark = pytest.mark.skipif(lacking is not None, reason=f"processes cannot be locked in here: {lacking}")

ROOT = Path(__file__).parents[3]

# Each of these is tried twice: before, where it works, and inside.
_PROGRAM = r"""
import ctypes, json, os, resource, signal, socket, sys, threading, time
from pathlib import Path

own, secret, parent = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

def child():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def linked():
    (own / "link").unlink(missing_ok=True)
    os.symlink(secret, own / "link")

ATTACKS = {
    "read a file": lambda: secret.read_bytes(),
    "read through a link": lambda: (own / "escape").read_bytes(),
    "read passwords": lambda: Path("/etc/passwd").read_bytes(),
    "list a folder": lambda: os.listdir(secret.parent),
    "list the root": lambda: os.listdir("/"),
    "write a file": lambda: (secret.parent / "new").write_bytes(b""),
    "write its own file": lambda: (own / "model").open("ab").close(),
    "make a folder": lambda: os.makedirs(secret.parent / f"made{time.time_ns()}"),
    "make a link": linked,
    "change modes": lambda: os.chmod(own / "model", 0o600),
    "change times": lambda: os.utime(own / "model"),
    "cut a file": lambda: os.truncate(own / "other", 3),
    "open a socket": lambda: socket.socket().close(),
    "open a local socket": lambda: socket.socket(socket.AF_UNIX).close(),
    "open a pair of sockets": lambda: [s.close() for s in socket.socketpair()],
    "start a process": child,
    "run a program": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "signal its parent": lambda: os.kill(parent, 0),
    "look at its parent": lambda: Path(f"/proc/{parent}/environ").read_bytes(),
    "raise its limits": lambda: resource.setrlimit(resource.RLIMIT_NICE, (0, 0)),
    "use io_uring": lambda: call(425, 1, ctypes.byref((ctypes.c_uint64 * 32)())),
    "make shared memory": lambda: os.close(os.memfd_create("x")),
}
if os.uname().machine == "x86_64":
    ATTACKS["read the memory of another"] = lambda: call(310, parent, 0, 0, 0, 0, 0)

def tried():
    found = {}
    for name, attack in ATTACKS.items():
        try:
            attack()
            found[name] = "done"
        except (OSError, ValueError) as exc:
            found[name] = str(exc)
    return found

before = tried()
held = os.open(secret, os.O_RDONLY)
pair = socket.socketpair()
numbers = [held, *(end.fileno() for end in pair)]
kept = [(os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in numbers]
from kindler import jail
jail.enter([own])
inside = tried()
computed = []
thread = threading.Thread(target=lambda: computed.append(sum(range(10))))
thread.start()
thread.join()
import numpy, wave  # a library, and a module of Python's that nobody has loaded yet
def is_still_there(fd):
    try:
        return (os.fstat(fd).st_dev, os.fstat(fd).st_ino) in kept
    except OSError:
        return False
closed = not any(map(is_still_there, numbers))
print(json.dumps({
    "before": before, "inside": inside, "own": (own / "model").read_text(), "computed": computed,
    "sum": int(numpy.arange(4).sum()), "environment": sorted(os.environ), "closed": closed,
    "core": resource.getrlimit(resource.RLIMIT_CORE), "files": resource.getrlimit(resource.RLIMIT_FSIZE),
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    own, other = tmp_path_factory.mktemp("version"), tmp_path_factory.mktemp("other")
    (own / "model").write_text("weights")
    (own / "other").write_text("more of it")
    (other / "secret").write_text("hush")
    (own / "escape").symlink_to(other / "secret")
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(own), str(other / "secret"), str(os.getpid())],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "DATABASE_PASSWORD": "hush"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    told: dict[str, Any] = json.loads(process.stdout)
    return told


def test_nothing_that_leads_out_can_be_done_inside(found: dict[str, Any]) -> None:
    done = [name for name, how in found["inside"].items() if how == "done"]
    assert done == []
    # That it cannot is the jail's doing: before, all but what this kernel or this user has not worked.
    worked = [name for name, how in found["before"].items() if how == "done"]
    assert {"read a file", "open a socket", "start a process", "run a program", "signal its parent"} <= {
        *worked
    }
    assert len(worked) > 15


def test_its_own_files_and_libraries_can_be_read_and_it_can_compute(found: dict[str, Any]) -> None:
    assert found["own"] == "weights"
    assert (found["computed"], found["sum"]) == ([45], 6)


def test_neither_environment_nor_open_files_come_along(found: dict[str, Any]) -> None:
    assert set(found["environment"]) <= {*jail.ENVIRONMENT, "HOME"}
    assert found["closed"]
    assert (found["core"], found["files"]) == ([0, 0], [0, 0])


def test_a_process_with_other_threads_is_not_locked_in_by_half() -> None:
    program = (
        "import threading, kindler.jail\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "try:\n    kindler.jail.enter([])\nexcept OSError as exc:\n    print(exc)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "2 threads" in said


def test_the_folder_that_a_program_was_started_in_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), ".", "", str(ROOT / "src")]))
    assert tmp_path not in jail.libraries()
    assert ROOT / "src" in jail.libraries()
