"""A sandboxed process, tried from the inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kindler import sandbox

lacking = sandbox.unavailable_reason()
pytestmark = pytest.mark.skipif(lacking is not None, reason=f"processes cannot be sandboxed here: {lacking}")

ROOT = Path(__file__).parents[3]

# Each of these is tried twice: before, where it works, and inside.
_PROGRAM = r"""
import ctypes, fcntl, json, mmap, os, resource, signal, socket, struct, sys, threading, time
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

mine, theirs = socket.socketpair()
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
at, files = struct.pack("i", parent), resource.RLIMIT_NOFILE

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
    "map memory that is shared": lambda: mmap.mmap(-1, 4096).close(),
    "map memory that is shared and checked": lambda: mmap.mmap(-1, 4096, flags=0x20 | 0x03).close(),
    "map memory as a stack": lambda: mmap.mmap(-1, 4096, flags=private | 0x100).close(),
    "share zeros": lambda: os.close(os.open("/dev/zero", os.O_RDONLY)),
    "own signals by FIOSETOWN": lambda: fcntl.ioctl(mine, 0x8901, at),
    "own signals by SIOCSPGRP": lambda: fcntl.ioctl(mine, 0x8902, at),
    "own signals by F_SETOWN": lambda: fcntl.fcntl(mine, fcntl.F_SETOWN, parent),
    "own signals by F_SETOWN_EX": lambda: fcntl.fcntl(mine, 15, struct.pack("ii", 1, parent)),
    "choose a signal": lambda: fcntl.fcntl(mine, fcntl.F_SETSIG, signal.SIGURG),
    "be signalled at all": lambda: fcntl.ioctl(mine, 0x5452, struct.pack("i", 1)),
    "lease its file": lambda: fcntl.fcntl(os.open(own / "other", 0), fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "move its parent": lambda: os.sched_setaffinity(parent, os.sched_getaffinity(0)),
    "schedule its parent": lambda: os.sched_setscheduler(parent, os.SCHED_OTHER, os.sched_param(0)),
    "slow its parent down": lambda: os.setpriority(os.PRIO_PROCESS, parent, 0),
    "look at its parent's limits": lambda: resource.prlimit(parent, files),
    "limit its parent": lambda: resource.prlimit(parent, files, resource.getrlimit(files)),
    "get hold of its parent": lambda: os.close(os.pidfd_open(parent)),
}
# Calls by which one process acts on another; whatever they would answer, they are not made.
RAW = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "perf_event_open": (298, 241), "migrate_pages": (256, 238), "move_pages": (279, 239), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "get_robust_list": (274, 100), "sched_setattr": (314, 274), "sched_setparam": (142, 118),
    "ioprio_set": (251, 30), "setpgid": (109, 154), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "userfaultfd": (323, 282), "setns": (308, 268), "unshare": (272, 97),
    "bpf": (321, 280), "keyctl": (250, 219), "ftruncate": (77, 46), "memfd_create": (319, 279),
}
column = ("x86_64", "aarch64").index(os.uname().machine)

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
from kindler import sandbox
sandbox.enter([own], keep=(mine.fileno(),))
inside = tried()
made = []
for name, numbers in RAW.items():
    if libc.syscall(numbers[column], -1, -1, -1, -1, -1, -1) >= 0 or ctypes.get_errno() != 1:
        made.append(name)
for pid in (0, os.getpid()):  # itself it may move
    os.sched_setaffinity(pid, os.sched_getaffinity(0))
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
    "before": before, "inside": inside, "made": made, "computed": computed,
    "own": (own / "model").read_text(),
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
    # That it cannot is the sandbox's doing: before, all but what this kernel or this user has not worked.
    worked = [name for name, how in found["before"].items() if how == "done"]
    assert {"read a file", "open a socket", "start a process", "run a program", "signal its parent"} <= {
        *worked
    }
    assert len(worked) > 30


def test_no_call_that_acts_on_other_processes_is_made_inside(found: dict[str, Any]) -> None:
    assert found["made"] == []


def test_its_own_files_and_libraries_can_be_read_and_it_can_compute(found: dict[str, Any]) -> None:
    assert found["own"] == "weights"
    assert (found["computed"], found["sum"]) == ([45], 6)


def test_neither_environment_nor_open_files_come_along(found: dict[str, Any]) -> None:
    assert set(found["environment"]) <= {*sandbox.ENVIRONMENT, "HOME"}
    assert found["closed"]
    assert (found["core"], found["files"]) == ([0, 0], [0, 0])


def test_a_process_with_other_threads_is_not_sandboxed_by_half() -> None:
    program = (
        "import threading, kindler.sandbox\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "try:\n    kindler.sandbox.enter([])\nexcept OSError as exc:\n    print(exc)\n"
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
    assert tmp_path not in sandbox.libraries()
    assert ROOT / "src" in sandbox.libraries()


_GREEDY = r"""
import ctypes, mmap, os, sys, threading
from kindler import sandbox
sandbox.limit(1 << 30)
sandbox.enter([])
def pages():
    # Nothing is written, so no limit counts it; the tables of pages are there all the same.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    for _ in range(20):
        memory = mmap.mmap(-1, 4 << 30, flags=flags, prot=mmap.PROT_READ)
        held.append(memory)
        for at in range(0, len(memory), 2 << 20):
            memory[at]
def threads():
    for _ in range(sandbox.MAX_THREADS + 1):
        threading.Thread(target=stop.wait, daemon=True).start()
stop, held = threading.Event(), []
threading.stack_size(1 << 16)
{"pages": pages, "threads": threads}[sys.argv[1]]()
print("now", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("what", "told"), [("pages", "bytes of memory"), ("threads", "threads")])
def test_what_no_limit_of_the_kernel_counts_is_seen_from_outside(what: str, told: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _GREEDY, what],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        most = 150 << 20 if what == "pages" else 1 << 30
        found = sandbox.excess(process.pid, most, threads=sandbox.MAX_THREADS)
        assert told in str(found)
        assert sandbox.excess(process.pid, 1 << 40) is None
        assert "bytes of memory" in str(sandbox.excess(process.pid, 1 << 32, shared_bytes=1 << 32))
        process.kill()


def test_addresses_cannot_be_taken_without_end() -> None:
    program = (
        "import mmap, kindler.sandbox\n"
        "kindler.sandbox.limit(1 << 30); kindler.sandbox.enter([])\n"
        "flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000\n"
        "try:\n    mmap.mmap(-1, 1 << 40, flags=flags, prot=mmap.PROT_READ)\n"
        "except (OSError, MemoryError) as exc:\n    print(exc)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "allocate memory" in said
