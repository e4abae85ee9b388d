"""What a process may use of its machine: GPUs, cores, memory, ports, addresses and module paths.

Nothing here calls CUDA: a process that has done so cannot be forked.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from kindler import limits
from kindler.errors import ConfigError

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
TASK_GPUS = "KINDLER_TASK_GPUS"  # those that the cluster manager gave to a rank, whether it uses them or not
_NUMBERED = re.compile(r"cuda:\d{1,4}")
# Without these, JAX takes three quarters of a GPU's memory at its start and TensorFlow all of it.
FRUGAL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


@dataclass(frozen=True, slots=True)
class Placement:
    device: str  # what to ask the framework for: what was asked for, without a number
    # The GPUs that the rank sees; None leaves what is visible as it is.
    visible: tuple[str, ...] | None = None
    index: int = 0  # the number of its own among them
    shared: bool = False  # whether other ranks use it too
    problem: str | None = None  # what to say if the rank does compute on a GPU

    def take(self) -> None:
        """Restrict this process to its own GPUs. Call it before a framework looks for them."""
        if self.visible is not None:
            os.environ[VISIBLE_GPUS] = ",".join(self.visible)
        if self.shared:
            for name, value in FRUGAL.items():
                os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class TaskPlace:
    number: int
    gpus: tuple[str, ...] = ()


def place(
    device: str,
    *,
    local_rank: int,
    local_size: int,
    share: bool,
    assigned: Sequence[str],
    gpus: Sequence[str],
) -> Placement:
    """`assigned` are the GPUs that the cluster manager gave to this rank, `gpus` those of the machine."""
    number = int(device.partition(":")[2]) if _NUMBERED.fullmatch(device) else None
    own = list(assigned) or list(gpus)
    if (device not in ("auto", "cuda") and number is None) or not own:
        return Placement(device, index=local_rank)
    if number is not None and number >= len(own):
        raise ConfigError(
            f"device {device!r} was requested; there are {len(own)} GPUs for this worker: {', '.join(own)}."
        )
    kind = device.partition(":")[0]
    if assigned:
        return Placement(kind, tuple(assigned), number or 0)
    crowded = local_size > (len(gpus) if number is None else 1)
    chosen = gpus[local_rank % len(gpus) if number is None else number]
    problem = None
    if crowded and not share:
        problem = crowd_message(local_size, len(gpus), device)
    return Placement(kind, (chosen,), shared=crowded, problem=problem)


def is_device(text: object) -> bool:
    known = ("auto", "cpu", "cuda")
    return isinstance(text, str) and (text in known or _NUMBERED.fullmatch(text) is not None)


def crowd_message(workers: int, gpus: int, device: str) -> str:
    named = ":" in device
    more = f" and device={device!r}" if named else ""
    return (
        f"{workers} workers on one machine, which has {gpus} GPU{'s' if gpus != 1 else ''}{more}: each "
        f"worker "
        "needs its own.\n"
        f"Hint: workers={1 if named else gpus}; or device=Device(share=True), if they all fit into the memory"
        " of one; or device='cpu'."
    )


def machine_gpus() -> list[str]:
    visible = os.environ.get(VISIBLE_GPUS)
    if visible is not None:
        return [number.strip() for number in visible.split(",") if number.strip() not in ("", "-1")]
    nodes = [path.name for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    if not nodes and shutil.which("nvidia-smi") is None:
        return []
    listed = [line.partition(",")[0].strip() for line in ask_driver("--query-gpu=index,uuid")]
    return listed or [str(number) for number in range(len(nodes))]


def ask_driver(query: str) -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=limits.GPU_QUERY_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]


def gpu_memory() -> dict[str, int]:
    """Bytes of each GPU, by number and by UUID; empty if nvidia-smi does not answer."""
    sizes: dict[str, int] = {}
    for line in ask_driver("--query-gpu=index,uuid,memory.total"):
        index, uuid, size = (part.strip() for part in f"{line},,".split(",")[:3])
        if size.removesuffix(" MiB").isdecimal():
            sizes[index] = sizes[uuid] = int(size.removesuffix(" MiB")) << 20
    return sizes


def gpus_of_task() -> list[str]:
    return [number for number in os.environ.get(TASK_GPUS, "").split(",") if number]


_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def usable_cores(root: Path = Path("/")) -> int:
    """The smaller of the CPUs this process may run on and the CPU time its cgroups grant."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    # A grant of a core and a half keeps one thread busy, not two.
    return max(1, int(min([float(allowed), *_grants(root)])))


def half_of_memory(limits: Sequence[str] = _LIMITS) -> int:
    sizes = []
    try:
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        sizes.append(8 << 30)
    for path in limits:
        try:
            sizes.append(int(Path(path).read_text()))
        except (ValueError, OSError):
            pass
    return min(sizes) // 2


def _grants(root: Path) -> Iterator[float]:
    """Cores' worth of CPU time granted by the cgroups (v2 and v1) around this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers:
            for folder in _upwards(root / "sys/fs/cgroup", place):
                yield from _quota(_words(folder / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for mount in ("cpu", "cpu,cpuacct"):
                for folder in _upwards(root / "sys/fs/cgroup" / mount, place):
                    yield from _quota(
                        _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
                    )


def _upwards(mount: Path, place: str) -> Iterator[Path]:
    """The group's folder and its parents, which limit it too; in a container the mount is the group."""
    folder = mount / place.lstrip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _quota(words: list[str]) -> Iterator[float]:
    try:
        quota, period = (int(word) for word in words)
    except ValueError:
        return  # no such file, or "max": no limit
    if quota > 0 and period > 0:
        yield quota / period


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


_V4, _V6 = "0.0.0.0", "::"  # every address: it is not known which one the program binds


class HeldPorts:
    """TCP ports held for a user's program until it binds them or they are released.

    A held port is bound with SO_REUSEADDR and not listened on: the kernel gives it to nobody who asks for a
    free port, and lets a program bind it that sets SO_REUSEADDR as well (gRPC, torch's store, asyncio, HTTP
    servers). For any other program, release it first. Of `address` only the family counts.
    """

    def __init__(self, count: int, *, address: str, ports: tuple[int, int] | None = None) -> None:
        self._sockets: list[socket.socket] = []
        try:
            while len(self._sockets) < count:
                self._sockets.append(_hold(address, ports))
        except OSError:
            self.release()
            raise
        self.numbers: tuple[int, ...] = tuple(port.getsockname()[1] for port in self._sockets)

    def release(self) -> None:
        while self._sockets:
            self._sockets.pop().close()


def _hold(address: str, ports: tuple[int, int] | None) -> socket.socket:
    if ports is None:
        return _bound(address, 0)
    for port in random.sample(range(ports[0], ports[1] + 1), ports[1] - ports[0] + 1):
        try:
            return _bound(address, port)
        except OSError:
            continue
    raise OSError(f"no port from {ports[0]} to {ports[1]} is free")


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind((_V6 if family == socket.AF_INET6 else _V4, port))
        # Only now: a port that somebody else holds is not taken a second time.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
    except OSError:
        sock.close()
        raise
    return sock


_LOOPBACK = "127.0.0.1"


def own_address(hosts: Collection[str], *, seen: str) -> str:
    """An address, because a host name may not resolve, or resolve to an interface others cannot reach."""
    return _LOOPBACK if len(set(hosts)) == 1 else seen


def address_towards(host: str) -> str:
    """The address of the interface by which this machine reaches `host`; sends nothing."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:  # no route at all: this machine only
        return _LOOPBACK


# What a Python puts on its path by itself begins with the zip file of its library, which need not exist.
_LIBRARY = re.compile(r"python3\d+\.zip|python3\.\d+|lib-dynload|(site|dist)-packages")


def program_path() -> tuple[str, ...]:
    return tuple(place for path in sys.path for place in _places(path))


def _places(path: str) -> Iterator[str]:
    if path:
        yield os.path.abspath(path)
        return
    # The folder of an interactive program, which may have changed it since it imported its modules.
    yield from _folder()
    yield from _BEGAN_IN


def _folder() -> list[str]:
    try:
        return [os.getcwd()]
    except FileNotFoundError:  # somebody has deleted it
        return []


_BEGAN_IN = _folder()


def enter_program_path(paths: Sequence[str]) -> None:
    here = map(os.path.abspath, sys.path)
    if all(path in here for path in paths):  # in that order: this is the program, and the path its own
        return
    sys.path[:] = merged_path(sys.path, paths)


def merged_path(
    own: Sequence[str], other: Sequence[str], exists: Callable[[str], bool] = os.path.exists
) -> list[str]:
    """The search path of a process that takes over another's program.

    The program's own folders come first, so that its `utils` is the same module here, whatever else has that
    name. Libraries stay those of this process: its Python may be another one.

    >>> other = ["/proj", "/usr/lib/python311.zip", "/usr/lib/site-packages", "/more"]
    >>> merged_path(["/cwd", "/opt/lib/python311.zip"], other, lambda path: not path.endswith("zip"))
    ['/proj', '/cwd', '/opt/lib/python311.zip', '/usr/lib/site-packages', '/more']
    """
    first = [*takewhile(lambda path: not _LIBRARY.fullmatch(os.path.basename(path)), other)]
    first = [path for path in dict.fromkeys(first) if exists(path)]
    kept = [path for path in own if path not in first]
    last = [path for path in dict.fromkeys(other) if path not in first and path not in kept and exists(path)]
    return [*first, *kept, *last]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker of a run, as its own program sees it.

    Attributes:
        rank: Its number among all workers, from 0.
        size: The number of workers.
        local_rank: Its number among the workers of its machine.
        local_size: The number of workers on its machine.
        host: The name of its machine.
        device: "cpu" or "cuda". A worker sees only its own GPU, unless several were assigned to it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = ""
    device: str = "cpu"


_current_worker: WorkerInfo | None = None


def current_worker() -> WorkerInfo:
    """Return the worker this code runs in; outside a run, a single worker on this machine's CPU.

    In workers that train or evaluate, the variables RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE say the
    same to libraries that look for them.

    >>> current_worker().rank, current_worker().size, current_worker().device
    (0, 1, 'cpu')
    """
    return _current_worker or WorkerInfo(host=socket.gethostname())


def set_current_worker(info: WorkerInfo) -> None:
    global _current_worker
    _current_worker = info
    os.environ.update(
        RANK=str(info.rank),
        WORLD_SIZE=str(info.size),
        LOCAL_RANK=str(info.local_rank),
        LOCAL_WORLD_SIZE=str(info.local_size),
    )
