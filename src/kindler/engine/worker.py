"""What runs inside a worker process; it talks to its supervisor alone, over the socket it was born with."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from kindler.engine.feeds import WINDOW_BYTES, FeedReader, Feeds, FeedWriter, is_feed
from kindler.engine.fork_server import flush_output
from kindler.engine.job import cluster_spec, members_of
from kindler.engine.links import answer_calls, call, connect_links
from kindler.engine.meeting import (
    Halting,
    Wants,
    decode_parts,
    read_arrays,
    read_numbers,
    weighted_arrays,
    write_numbers,
)
from kindler.engine.notices import SIGTERM, telling
from kindler.engine.placement import (
    Placement,
    WorkerInfo,
    enter_program_path,
    gpus_of_task,
    machine_gpus,
    place,
    set_current_worker,
    usable_cores,
)
from kindler.engine.wire import Channel
from kindler.errors import ConfigError, KindlerError, SyncError, SyncTimeoutError, plain_fields
from kindler.frame import ChannelClosed, Frame
from kindler.group import Group

STACKS = "stacks.txt"  # in the scratch folder

_PACKAGE = str(Path(__file__).resolve().parents[1])
_stacks: IO[str] | None = None  # the fault handler keeps its number, not the file


class Worker(Group):
    """A group whose ranks meet at the hub."""

    def __init__(self, channel: Channel, fields: dict[str, Any]) -> None:
        self.rank = fields["rank"]
        hosts: tuple[str, ...] = tuple(fields["hosts"])
        self.hosts = hosts[: fields.get("crew")]
        self.size = len(self.hosts)
        self.replaceable = fields.get("replaceable", False)
        self.regroups = fields.get("regroups", False)
        self.host = hosts[self.rank]
        self._roles: Sequence[str] = fields["roles"]
        self.members = members_of(self._roles, hosts, fields["addresses"], fields["ports"])
        me = self.members[self.rank]
        self.role, self.index, self.address, self.ports = me.role, me.index, me.address, me.ports
        self.local_rank = hosts[: self.rank].count(self.host)
        self.local_size = hosts.count(self.host)
        self.scratch = Path(fields["scratch"])
        self.run_id = fields["run_id"]
        self.secret = bytes.fromhex(fields["secret"])
        ports = fields.get("port_range")
        self.port_range = (ports[0], ports[1]) if ports else None
        self.threads = fields["threads"] or self._share(fields.get("cores"))
        self._sync_timeout_s: float = fields["sync_timeout_s"]
        self._channel = channel
        self._is_fed: bool = fields["fed"]
        self._feeds = Feeds("the driver", channel.send, waiting=self.tick)
        self._released = threading.Event()
        # Of a service with a grace: set once every other rank has a result; it should return.
        self.others_ended = threading.Event()
        self._halting = Halting()
        # None is the answer to a gather that a rank died before.
        self._gathered: queue.Queue[tuple[list[bytes], frozenset[int]] | None] = queue.Queue()
        self._somebody_gone = threading.Event()
        self._turn = 0
        self._ticks = 0
        self._waiting = False

    def _share(self, granted: int | None) -> int:
        cores = usable_cores()
        return max(1, (cores if granted is None else min(cores, granted)) // self.local_size)

    def place(self, device: str, *, share: bool) -> Placement:
        """Take a GPU of this machine, or none; `kindler.current_worker()` knows its worker from now on."""
        neighbours = self.hosts.count(self.host)
        placement = place(
            device,
            local_rank=self.local_rank,
            local_size=neighbours,
            share=share,
            assigned=gpus_of_task(),
            gpus=[] if device == "cpu" else machine_gpus(),
        )
        placement.take()
        kind = "cpu" if placement.visible is None else "cuda"
        set_current_worker(WorkerInfo(self.rank, self.size, self.local_rank, neighbours, self.host, kind))
        return placement

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._meet(data, "all")

    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]:
        wanted = sorted(ranks)
        return dict(zip(wanted, self._meet(data, wanted), strict=True))

    def total(self, numbers: Sequence[int]) -> list[int]:
        return read_numbers(self._meet(write_numbers(numbers), "sum")[0])

    def mean(self, arrays: Sequence[np.ndarray[Any, Any]], weight: float) -> list[np.ndarray[Any, Any]]:
        if self.size == 1:
            self.tick()
            return [array.copy() if weight else np.zeros_like(array) for array in arrays]
        return read_arrays(self._meet(weighted_arrays(arrays, weight), "mean")[0])

    def opened(self) -> bytes:
        self._channel.send("open", turn=self._turn)
        turn, kept = self._answer("opened")
        self._turn = int(turn)
        return kept

    def regroup(self, timeout_s: float) -> bool:
        if not self.regroups or not self._somebody_gone.wait(timeout_s):
            return False
        self._channel.send("regroup")
        self._turn = int(self._answer("regroup")[0])
        return True

    def resumed(self) -> None:
        self._channel.send("resumed")

    def forgo_regroup(self) -> None:
        self.regroups = False
        self._channel.send("forgo")

    def _regrouped(self, frame: Frame) -> None:
        where = json.loads(frame.buffers[0])
        self.hosts = tuple(where["hosts"])[: self.size]
        self.members = members_of(self._roles, where["hosts"], where["addresses"], where["ports"])
        self._somebody_gone.clear()
        self.absent = frozenset()
        self._gathered.put(([str(frame.fields["turn"]).encode(), b"regrouped"], frozenset()))

    def keep(self, data: bytes) -> None:
        self._channel.send("keep", data, turn=self._turn)

    def _meet(self, data: bytes, wants: Wants) -> list[bytes]:
        if self.size == 1:
            self.tick()
            return [] if wants == [] else [data]
        turn, self._turn = self._turn, self._turn + 1
        self._channel.send("gather", data, turn=turn, wants=wants)
        return self._answer("all_gather")

    def _answer(self, op: str) -> list[bytes]:
        self.waiting = True
        try:
            answer = self._gathered.get(timeout=self._sync_timeout_s)
        except queue.Empty:
            others = [rank for rank in range(self.size) if rank != self.rank]
            raise SyncTimeoutError(
                op=op, missing=others, size=self.size, waited_s=self._sync_timeout_s
            ) from None
        finally:
            self.waiting = False
        if answer is None:
            raise SyncError(f"{op}: workers {sorted(self.absent)} died before they took part.")
        gathered, self.lost = answer
        return gathered

    @property
    def waiting(self) -> bool:
        """Whether this rank waits for others; exchanges set it. Having waited is a tick."""
        return self._waiting

    @waiting.setter
    def waiting(self, waiting: bool) -> None:
        if self._waiting and not waiting:
            self.tick()
        self._waiting = waiting

    def tick(self) -> None:
        self._ticks += 1

    def go_on(self, number: int, *, whole: bool = True) -> bool:
        return self._halting.go_on(number, whole=whole, timeout_s=self._sync_timeout_s)

    def links(self, peers: Collection[int], timeout_s: float) -> dict[int, socket.socket]:
        return connect_links(self, peers, timeout_s=timeout_s)

    def become_optional(self) -> None:
        self.outlives = True
        self._channel.send("optional")

    def call(self, rank: int, timeout_s: float) -> socket.socket:
        return call(self.members[rank], self.rank, self.secret, timeout_s=timeout_s)

    def answer_calls(self, take: Callable[[int, socket.socket], None], check: Callable[[], None]) -> None:
        answer_calls(self.ports[0], self.address, self.secret, take, check, expected=self.size)

    @property
    def cluster_spec(self) -> dict[str, list[str]]:
        return cluster_spec(self.members)

    def release_ports(self) -> None:
        """Release the held ports, for a program that binds without SO_REUSEADDR and does so at once."""
        self._channel.send("release")
        if not self._released.wait(self._sync_timeout_s):
            raise SyncError(f"the held ports of worker {self.rank} were not released.")

    def feed(self, name: str) -> FeedReader:
        """Raises ConfigError if the workers cannot reach the driver."""
        self._check_fed()
        return self._feeds.reader(name)

    def output(self, name: str, window_bytes: int = WINDOW_BYTES) -> FeedWriter:
        """Raises ConfigError if the workers cannot reach the driver."""
        self._check_fed()
        return self._feeds.writer(name, window_bytes)

    def _check_fed(self) -> None:
        if not self._is_fed:
            raise ConfigError(
                "feeds need workers that reach the driver, and these meet only among themselves.\n"
                'Hint: RunSettings(rendezvous="driver") where the driver can be reached.'
            )

    def report(self, kind: str, **fields: Any) -> None:
        self.tick()
        if self.replaceable or self.regroups:  # a process that takes the place of this one will say it again
            fields["turn"] = self._turn
        self._channel.send("report", name=kind, **fields)

    def received(self, frame: Frame) -> None:
        if frame.kind == "gathered":
            self._gathered.put((decode_parts(frame), frozenset(frame.fields.get("lost", ()))))
        elif frame.kind == "gone":
            self.absent |= {int(frame.fields["rank"])}
            self._somebody_gone.set()
        elif frame.kind == "void":
            self._gathered.put(None)
        elif frame.kind == "regrouped":
            self._regrouped(frame)
        elif is_feed(frame.kind):
            self._feeds.received(frame)
        elif frame.kind == "released":
            self._released.set()
        elif frame.kind == "ending":
            self.others_ended.set()
        elif frame.kind == "halt":
            self._channel.send("halting", begun=self._halting.asked())
        elif frame.kind == "halt_at":
            self.moves = frame.fields["moves"]
            self._halting.answer(int(frame.fields["last"]))

    def beat(self) -> None:
        self._channel.send("beat", ticks=self._ticks, waiting=self._waiting)

    def tell_sigterm(self) -> None:
        with suppress(ChannelClosed):  # `_listen` ends the process
            self._channel.send("notice", reason=SIGTERM)


def run_child(sock: socket.socket) -> int:
    faulthandler.enable()
    channel = Channel(sock)
    job = channel.receive()
    # Taken one by one: what nobody holds on to goes once the callee is done with it.
    cargo = channel.receive(job.fields["sync_timeout_s"]) if job.fields.get("cargo") else job
    buffers = list(cargo.buffers)
    del cargo
    job = replace(job, buffers=())
    worker = Worker(channel, job.fields)
    _start(lambda: _listen(channel, worker), "kindler-listen")
    _start(lambda: _beat(worker, job.fields["heartbeat_s"]), "kindler-beat")
    _answer_with_stacks(worker.scratch / STACKS)
    enter_program_path(job.fields["sys_path"])
    if os.path.isdir(job.fields["cwd"]):  # stand where the driver stands, if this machine has that place
        os.chdir(job.fields["cwd"])
    try:
        with telling(worker.tell_sigterm) if job.fields["movable"] else nullcontext():
            module, _, name = job.fields["target"].partition(":")
            results = getattr(importlib.import_module(module), name)(worker, *_taken(buffers))
    except BaseException as exc:  # noqa: BLE001 - the edge of the worker: the driver raises it
        flush_output()  # its end is told once all lines were passed on
        channel.send("error", **describe(exc))
        return 1
    flush_output()
    channel.send("result", *results)
    return 0


def _taken(buffers: list[bytes]) -> Iterator[bytes]:
    while buffers:
        yield buffers.pop(0)


def describe(exc: BaseException) -> dict[str, Any]:
    types = [_qualified(cls) for cls in type(exc).__mro__ if cls is not object]
    return {
        "types": types,
        "message": message_of(exc),
        "traceback": "".join(traceback.format_exception(type(exc), exc, _users_part(exc))),
        "sync": isinstance(exc, SyncError),
        "own": exc.__dict__ if isinstance(exc, KindlerError) else {},
        "fields": {} if isinstance(exc, KindlerError) else plain_fields(exc),
    }


def _qualified(cls: type) -> str:
    """A class's name, with cloudpickle's mark if the class was pickled by value."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    marks = getattr(sys.modules.get("cloudpickle.cloudpickle"), "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {})
    return f"{name}@{marks[cls]}" if cls in marks else name


def message_of(exc: BaseException) -> str:
    """The message of an exception, or its repr if there is none."""
    # str(KeyError("a")) is "'a'"; the message is what was given to it.
    return str(exc.args[0]) if isinstance(exc, KeyError) and len(exc.args) == 1 else str(exc) or repr(exc)


def _users_part(exc: BaseException) -> Any:
    trace = exc.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    return trace or exc.__traceback__


def _listen(channel: Channel, worker: Worker) -> None:
    try:
        while True:
            worker.received(channel.receive())
    except ChannelClosed:
        os._exit(1)  # the supervisor is gone: nobody wants the result


def _answer_with_stacks(path: Path) -> None:
    """Make SIGUSR1 write the stacks of all threads to `path`, even while native code holds the GIL."""
    global _stacks
    _stacks = path.open("w")
    _stacks.write(f"main 0x{threading.main_thread().ident:016x}\n")
    _stacks.flush()
    faulthandler.register(signal.SIGUSR1, file=_stacks, all_threads=True, chain=False)


def _beat(worker: Worker, every_s: float) -> None:
    pause = threading.Event()
    try:
        while not pause.wait(every_s):
            worker.beat()
    except ChannelClosed:
        pass  # `_listen` ends the process


def _start(run: Callable[[], None], name: str) -> None:
    threading.Thread(target=run, name=name, daemon=True).start()
