"""What the ranks of the gangs in tests do; `Job.ranks` names these functions."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time

from kindler.engine.worker import Worker


def facts(worker: Worker, *buffers: bytes) -> list[bytes]:
    """What a rank knows of itself and the others."""
    told = {
        "role": worker.role,
        "index": worker.index,
        "roles": [member.role for member in worker.members],
        "variable": os.environ.get("KINDLER_TEST_ROLE"),
        "spec": worker.cluster_spec,
        "endpoints": list(worker.members[worker.rank].endpoints),
    }
    return [json.dumps(told).encode(), *buffers]


def say_role(worker: Worker) -> list[bytes]:
    return [b"another target, role " + worker.role.encode()]


def fail(worker: Worker) -> list[bytes]:
    raise LookupError(f"{worker.role} gives up")


def talk(worker: Worker) -> list[bytes]:
    """Prints lines, the first as C does, the last one without its end."""
    ctypes.CDLL(None).puts(b"0")
    sys.stdout.write("\n".join(str(number) for number in range(1, 2_000)))
    return []


def talk_and_fail(worker: Worker) -> list[bytes]:
    talk(worker)
    raise LookupError("that was all")


def talk_and_die(worker: Worker) -> list[bytes]:
    talk(worker)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def hang(worker: Worker) -> list[bytes]:
    """Runs until somebody ends it."""
    worker.report("hanging")
    threading.Event().wait()
    return []


def echo(worker: Worker) -> list[bytes]:
    """Puts out what it is fed; returns how much that was."""
    count = 0
    with worker.output("echoed") as output:
        for batch in worker.feed("rows"):
            output.put(*batch)
            count += len(b"".join(batch))
    return [b"%d" % count]


def read_one(worker: Worker) -> list[bytes]:
    batch = worker.feed("rows").get()
    return list(batch or ())


def close_feed(worker: Worker) -> list[bytes]:
    reader = worker.feed("rows")
    reader.get()
    reader.close("seen enough")
    worker.feed("goodbye").get()
    return []


def read_one_and_die(worker: Worker) -> list[bytes]:
    worker.feed("rows").get()
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def read_one_and_stop(worker: Worker) -> list[bytes]:
    """Is frozen, as by a debugger, with more on its way than sockets hold."""
    worker.feed("rows").get()
    os.kill(os.getpid(), signal.SIGSTOP)
    return []


def fail_on_bad_feed(worker: Worker) -> list[bytes]:
    for _ in worker.feed("rows"):
        pass
    return []


def ring(worker: Worker) -> list[bytes]:
    """Binds the port that was held for it, and calls the next rank at the one that was held for that."""
    if worker.index == 0:
        worker.release_ports()  # as a program needs that binds without SO_REUSEADDR
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, worker.index != 0)
        server.bind((worker.address, worker.ports[0]))
        server.listen()
        worker.barrier()
        host, _, port = worker.cluster_spec[worker.role][(worker.index + 1) % worker.size].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as call:
            call.sendall(b"%d" % worker.rank)
        heard, _ = server.accept()
        with heard:
            return [heard.recv(16)]


def die_slowly(worker: Worker) -> list[bytes]:
    """Its connection closes well before it ends, as on a machine that is short of time."""
    os.closerange(3, 64)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
    return []
