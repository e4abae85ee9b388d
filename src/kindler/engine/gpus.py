"""Which GPU of its machine a rank computes on.

Those that the cluster manager gave to its task are its own. Otherwise ranks of one machine take one each, in
their order, and each sees no other. Nothing here asks CUDA: a process that has asked cannot be forked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kindler.engine.job import TASK_GPUS
from kindler.errors import ConfigError

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_TIMEOUT_S = 30.0
_NUMBERED = re.compile(r"cuda:\d{1,4}")
# Without these, JAX takes three quarters of a GPU's memory at its start and TensorFlow all of it.
FRUGAL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank computes.

    Attributes:
        device: What to ask the framework for: what was asked for, without a number.
        visible: The GPUs that the rank sees; None leaves what is visible as it is.
        index: The number of its own among them.
        shared: Whether other ranks use it too.
        problem: What to say if the rank does compute on a GPU.
    """

    device: str
    visible: tuple[str, ...] | None = None
    index: int = 0
    shared: bool = False
    problem: str | None = None

    def take(self) -> None:
        """Let this process see its own GPUs alone. Before a framework looks for them."""
        if self.visible is not None:
            os.environ[VISIBLE_GPUS] = ",".join(self.visible)
        if self.shared:
            for name, value in FRUGAL.items():
                os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """A task that scores rows beside others of its kind.

    Attributes:
        number: Which of them it is.
        gpus: The GPUs that the cluster manager gave to it; empty where it gave none.
    """

    number: int
    gpus: tuple[str, ...] = ()


def place(
    device: str, *, local_rank: int, local_size: int, share: bool, given: Sequence[str], gpus: Sequence[str]
) -> Placement:
    """Where a rank computes.

    Args:
        device: What was asked for: "auto", "cpu", "cuda" or "cuda:N".
        local_rank: The rank's number on its machine.
        local_size: How many ranks are there.
        share: Whether ranks may share a GPU.
        given: The GPUs that the cluster manager gave to this rank.
        gpus: Those of the machine.

    Raises:
        ConfigError: There is no such GPU.
    """
    number = int(device.partition(":")[2]) if _NUMBERED.fullmatch(device) else None
    own = list(given) or list(gpus)
    if (device not in ("auto", "cuda") and number is None) or not own:
        return Placement(device, index=local_rank)
    if number is not None and number >= len(own):
        raise ConfigError(
            f"device {device!r} was asked for; there are {len(own)} GPUs for this worker: {', '.join(own)}."
        )
    kind = device.partition(":")[0]
    if given:
        return Placement(kind, tuple(given), number or 0)
    crowded = local_size > (len(gpus) if number is None else 1)
    chosen = gpus[local_rank % len(gpus) if number is None else number]
    problem = None
    if crowded and not share:
        problem = crowd_message(local_size, len(gpus), device)
    return Placement(kind, (chosen,), shared=crowded, problem=problem)


def is_device(text: object) -> bool:
    """Whether this is "auto", "cpu", "cuda" or "cuda:N"."""
    known = ("auto", "cpu", "cuda")
    return isinstance(text, str) and (text in known or _NUMBERED.fullmatch(text) is not None)


def crowd_message(workers: int, gpus: int, device: str) -> str:
    """That there are more workers than GPUs for them, and what to do about it."""
    named = ":" in device
    more = f" and device={device!r}" if named else ""
    return (
        f"{workers} workers on one machine, which has {gpus} GPU{'s' if gpus != 1 else ''}{more}: each worker"
        " needs one of its own.\n"
        f"Hint: workers={1 if named else gpus}; or share_gpus=True, if they all fit into the memory of one;"
        " or device='cpu'."
    )


def machine_gpus() -> list[str]:
    """The numbers of this machine's GPUs, or of those that this process may see."""
    visible = os.environ.get(VISIBLE_GPUS)
    if visible is not None:
        return [number.strip() for number in visible.split(",") if number.strip() not in ("", "-1")]
    nodes = [path.name for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    if not nodes and shutil.which("nvidia-smi") is None:
        return []
    listed = [line.partition(",")[0].strip() for line in ask_driver("--query-gpu=index,uuid")]
    return listed or [str(number) for number in range(len(nodes))]


def ask_driver(query: str) -> list[str]:
    """The lines of nvidia-smi's answer; none where there is no such program or it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]


def gpu_memory() -> dict[str, int]:
    """The bytes of each GPU of the machine, by its number and by its UUID; empty where the driver is mute."""
    found: dict[str, int] = {}
    for line in ask_driver("--query-gpu=index,uuid,memory.total"):
        index, uuid, size = (part.strip() for part in f"{line},,".split(",")[:3])
        if size.removesuffix(" MiB").isdecimal():
            found[index] = found[uuid] = int(size.removesuffix(" MiB")) << 20
    return found


def gpus_of_task() -> list[str]:
    """The GPUs that the cluster manager gave to this rank."""
    return [number for number in os.environ.get(TASK_GPUS, "").split(",") if number]
