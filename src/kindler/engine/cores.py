"""How many cores and how much memory this process may use: a container or a scheduler may have given it less
than there is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def usable_cores(root: Path = Path("/")) -> int:
    """The least of the CPUs that this process may run on and the CPU time that its control groups grant.

    Args:
        root: Where /proc and /sys are.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    # A grant of a core and a half keeps one thread busy, not two.
    return max(1, int(min([float(allowed), *_grants(root)])))


def half_of_memory(limits: Sequence[str] = _LIMITS) -> int:
    """Half of what the machine, or the container that this is, has.

    Args:
        limits: Files that hold a number of bytes, or something else if there is no limit.
    """
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
    """Cores' worth of CPU time that the control groups around this process grant, of version 2 and 1."""
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
    """The group's folder and those above it, which limit it too; in a container the mount is the group."""
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
