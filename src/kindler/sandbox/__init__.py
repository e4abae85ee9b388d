"""A process that can compute, and do nothing else: for models and bodies of people one does not trust.

`enter` takes from this process the network, all files but a few to read, all others' processes, its
privileges, its environment and its open files. Nothing gives them back. It stands on three parts of Linux:
Landlock for files, seccomp for everything else, and limits of resources. `unavailable_reason` says what is
missing on other systems. `process.py` starts such a process and calls it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import resource
import site
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from kindler.sandbox import _landlock, _seccomp

# Variables that say how to compute, and nothing of who runs the server.
ENVIRONMENT = (
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE"),
    *("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    *("KERAS_BACKEND", "TF_USE_LEGACY_KERAS", "TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "TF_FORCE_GPU_ALLOW_GROWTH", "JAX_PLATFORMS"),
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)

EMPTY_HOME = "/dev/null"  # a home in which libraries can make no folders, and find none

# Where the system keeps libraries, and what they ask of the machine; nothing here is anybody's own.
_SYSTEM = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64", "/etc/ld.so.cache"),
    *("/usr/share/zoneinfo", "/etc/localtime", "/dev/random", "/dev/urandom"),
    *("/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu", "/sys/devices/system/node"),
)
_OWN = ("/proc/self/cmdline", "/proc/self/maps")  # of this process: TensorFlow ends without the first
_GPU = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-caps")
_GPU_READ = ("/proc/driver/nvidia", "/usr/local/cuda", "/sys/bus/pci/devices")
_OPEN_FILES = 512
MAX_THREADS = max(512, 16 * (os.cpu_count() or 1))  # of one process; frameworks start a few for each core
_ADDRESSES = 128 << 30  # beside its memory, for what is reserved: each 2 MiB that is looked at take 4 KiB
_inside = False
_TRY_S = 30.0


def enter(readable: Iterable[Path], *, keep: Collection[int] = ()) -> None:
    """Sandbox this process, for good. It must have one thread.

    It may read the files and folders of `readable`, besides the interpreter's and the system's libraries; the
    descriptors of `keep` stay open, besides 0, 1 and 2.

    Raises:
        OSError: The system does not have what it takes, or there are other threads, which would stay free.
    """
    if missing := _missing():
        raise OSError(errno.ENOSYS, missing)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise OSError(errno.EBUSY, f"the process has {threads} threads, of which only one would be sandboxed")
    for fd in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *keep}:
        with suppress(OSError):  # the one that listed them
            os.close(fd)
    for name in {*os.environ} - {*ENVIRONMENT}:
        del os.environ[name]
    os.environ["HOME"] = EMPTY_HOME
    for kind, value in {"CORE": 0, "FSIZE": 0, "NOFILE": _OPEN_FILES}.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (value, value))
    paths = [*map(Path, _SYSTEM), *libraries(), *readable]
    gpu = [Path(path) for path in _GPU if os.path.exists(path)] + sorted(Path("/dev").glob("nvidia[0-9]*"))
    if gpu:
        paths += [*map(Path, _GPU_READ), *Path("/sys/devices").glob("pci*")]
    else:  # the driver of a GPU reserves more addresses than there is memory anywhere
        data, _ = resource.getrlimit(resource.RLIMIT_DATA)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, used + 2 * max(data, 0) + _ADDRESSES)
    # All capabilities, by which root may do more than with its own files.
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None, use_errno=True).capset(header, none)
    _seccomp.no_new_privileges()
    # They stay open: the kernel may forget a file of /proc that nobody has open, and the rule with it.
    own = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in _OWN]
    paths += [Path(f"/proc/self/fd/{fd}") for fd in own]
    _landlock.confine(paths, writable=[Path("/dev/null")], devices=gpu)
    _seccomp.refuse_other_calls(gpu=bool(gpu))
    global _inside
    _inside = True
    sys.path[:] = [path for path in sys.path if _can_list(path)]


def limit(memory_bytes: int) -> None:
    """Limit the memory of this process, sandboxed or not; more is a `MemoryError`."""
    _lower(resource.RLIMIT_DATA, memory_bytes)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def is_inside() -> bool:
    return _inside


def excess(pid: int, memory_bytes: int, *, threads: int | None = None, shared_bytes: int = 0) -> str | None:
    """What a process has too much of, in words that follow "it"; None if nothing, or if nobody can say.

    From outside, and for what no limit of the kernel stops: pages of files and of areas that it was handed,
    tables of pages, and threads (which the kernel counts by user, over all containers of a machine).
    `shared_bytes` is what areas that it was handed take, whether they are in its memory or not.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            status = dict(line.split(b":", 1) for line in file if b":" in line)
        kilobytes = [int(status[name].split()[0]) for name in (b"VmRSS", b"RssShmem", b"VmPTE")]
        own, shared, tables = (n << 10 for n in kilobytes)
        running = int(status[b"Threads"])
        shared_bytes += _shared_with_nobody(pid) if os.path.exists(_GPU[0]) else 0
    except (OSError, KeyError, IndexError, ValueError):
        return None  # it has ended, or this system tells nothing
    if own - shared + max(shared, shared_bytes) + tables > memory_bytes:
        return f"used more than {memory_bytes} bytes of memory"
    return f"had more than {threads} threads" if threads is not None and running > threads else None


@functools.cache
def unavailable_reason() -> str | None:
    """Why processes cannot be sandboxed here; None if they can. Really tries it, in a process of its own."""
    if missing := _missing():
        return missing
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    try:
        tried = subprocess.run(
            [sys.executable, "-c", "import kindler.sandbox; kindler.sandbox._try_it()"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_TRY_S,
            text=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"a test process failed: {exc}"
    if tried.returncode == 0:
        return None
    return next(
        iter(reversed(tried.stderr.strip().splitlines())), f"a test process ended with {tried.returncode}"
    )


def libraries() -> list[Path]:
    """The folders that this interpreter imports from: its own, those of its packages, `PYTHONPATH`.

    The folder that a program was started in is none of them, though Python would import from there.
    """
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib", str(Path(__file__).parents[1])]
    sites = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    folders += sites
    for file in (file for folder in sites for file in sorted(Path(folder).glob("*.pth"))):
        # Where packages under development are imported from.
        lines = map(str.strip, file.read_text(errors="replace").splitlines())
        folders += [line for line in lines if os.path.isabs(line) and os.path.isdir(line)]
    for variable in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        named = os.environ.get(variable, "").split(os.pathsep)
        folders += [path for path in named if os.path.isabs(path) and Path(path) != Path.cwd()]
    return [path for path in dict.fromkeys(map(Path, folders)) if path.exists()]


def _lower(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (value, value))


def _shared_with_nobody(pid: int) -> int:
    """The bytes of shared memory that a process made for itself, as it may where there is a GPU. They count
    whether they are in its memory or not: it can put them out of sight, and keep them."""
    with open(f"/proc/{pid}/maps", "rb") as file:
        places = [line.split(b" ", 1)[0].split(b"-") for line in file if b" /dev/zero (deleted)" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in places)


def _missing() -> str | None:
    if sys.platform != "linux":
        return f"{sys.platform} has neither Landlock nor seccomp"
    if not _seccomp.is_known_machine():
        return f"the system calls of {os.uname().machine} are not known"
    return None if _landlock.version() else "the kernel has no Landlock, or keeps this process from using it"


def _try_it() -> None:
    """Enter a sandbox, and look whether it holds."""
    enter(())
    for attempt in (lambda: os.listdir("/"), socket.socket, os.fork):
        try:
            attempt()
        except PermissionError:
            continue
        raise SystemExit("a sandboxed process could still open files or sockets, or start others")
    if os.listdir(Path(__file__).parent):
        os._exit(0)


def _can_list(path: str) -> bool:
    try:
        return os.path.isfile(path) or bool(os.listdir(path))
    except OSError:
        return False
