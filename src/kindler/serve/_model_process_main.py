"""A process that has one version of a model in memory and computes what the server sends.

It is forked from a fork server that has the framework imported. Its first message is the order: which files,
how much memory, whether to be locked in. It answers with what the model takes, and from then on one call
after the other. It ends when the server does. The server's side is `model_process.py`.
"""

from __future__ import annotations

import faulthandler
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from kindler import jail
from kindler.models.loaded import LoadedModel, load_files
from kindler.models.predictor import CallablePredictor, Predictor
from kindler.models.row_independence import tried
from kindler.models.signature import Arrays
from kindler.serve.model_messages import (
    NEEDS_ROOM,
    REPLY,
    REPLY_IN_ROOM,
    WORD,
    read_word,
    told_error,
    told_model,
)
from kindler.serve.tensor_area import Area, Layout, layout, read_arrays, write_header
from kindler.serve.warm_up import warmed


def main(sock: socket.socket) -> int:
    """Serve until the server is gone; returns the exit status."""
    faulthandler.enable()
    sock.settimeout(None)
    try:
        _, size, length, fd = read_word(sock)
    except EOFError:
        return 0
    desk = _Desk(sock, Area(fd, size))
    order = orjson.loads(desk.own.memory[:length])
    try:
        loaded = _loaded(order, keep={sock.fileno(), fd})
        predictor = loaded.predictor
        joins = warmed(predictor, alone=order["alone"])
        taken = {"device": loaded.kind.device, "device_bytes": loaded.kind.device_bytes(order["meta"])}
        desk.answer({"model": {**told_model(predictor, joins), **taken}})
    except BaseException as exc:  # noqa: BLE001 - the edge of the process: the server is told
        desk.answer({"error": told_error(exc)})
        return 1
    # A function may keep what it is given; Kindler's own predictors do not.
    keeps = isinstance(predictor, CallablePredictor) or not _is_ours(predictor)
    try:
        while desk.serve_one(lambda header, inputs: _computed(predictor, header, inputs), copy=keeps):
            pass
    except (EOFError, OSError):
        pass  # the server is gone
    return 0


class _Desk:
    """Where calls come in and answers go out.

    Args:
        sock: The server's other end.
        own: The area for what is not large.
    """

    def __init__(self, sock: socket.socket, own: Area) -> None:
        self._sock = sock
        self.own = own

    def answer(self, header: dict[str, Any]) -> None:
        """Answer without arrays."""
        self._sock.sendall(WORD.pack(REPLY, 0, write_header(self.own.memory, header)))

    def serve_one(
        self, compute: Callable[[dict[str, Any], Arrays], tuple[dict[str, Any], Arrays]], *, copy: bool
    ) -> bool:
        """Wait for a call and answer it; False if there will be none."""
        try:
            _, at, length, fd = read_word(self._sock)
        except EOFError:
            return False
        large = Area(fd, os.fstat(fd).st_size) if fd >= 0 else None
        memory = (large or self.own).memory
        try:
            header = orjson.loads(memory[at : at + length])
            answer, outputs = compute(header, read_arrays(memory, header["arrays"], copy=copy, trusted=True))
            plan = layout({name: [array] for name, array in outputs.items()}, arrow=False)
        except BaseException as exc:  # noqa: BLE001 - whatever a model raises is told to whoever sent its rows
            self.answer({"error": told_error(exc)})
            return True
        finally:
            if large is not None:
                large.close()  # arrays that lie in it keep it
        self._send(answer, plan, at=0 if large else at + length)
        return True

    def _send(self, answer: dict[str, Any], plan: Layout, *, at: int) -> None:
        moved = plan.moved(at)
        header = orjson.dumps({**answer, "arrays": moved.entries})
        if moved.size + len(header) <= self.own.size:
            self._write(self.own, REPLY, moved, header)
            return
        header = orjson.dumps({**answer, "arrays": plan.entries})
        self._sock.sendall(WORD.pack(NEEDS_ROOM, plan.size + len(header), 0))
        _, size, _, fd = read_word(self._sock)
        if fd < 0:
            problem = MemoryError(f"the outputs take {plan.size} bytes; the server takes {size}")
            self.answer({"error": told_error(problem)})
            return
        room = Area(fd, size)
        try:
            self._write(room, REPLY_IN_ROOM, plan, header)
        finally:
            room.close()

    def _write(self, area: Area, kind: bytes, plan: Layout, header: bytes) -> None:
        plan.write(area.memory)
        area.memory[plan.size : plan.size + len(header)] = header
        self._sock.sendall(WORD.pack(kind, plan.size, len(header)))


def _loaded(order: dict[str, Any], *, keep: set[int]) -> LoadedModel:
    folder = Path(order["folder"])
    jail.limit(order["memory_bytes"])
    if order["jailed"]:
        os.chdir("/")
        jail.enter([folder], keep=keep)
    return load_files(
        order["kind"], folder, order["meta"], trusted=order["trusted"], device=order.get("device")
    )


def _computed(predictor: Predictor, header: dict[str, Any], inputs: Arrays) -> tuple[dict[str, Any], Arrays]:
    method, first = header["method"], header.get("first")
    if first is None:
        return {}, predictor.call(inputs, method)
    trial = tried(lambda rows: predictor.call(rows, method), inputs, first)
    if not trial.per_row:
        return {"per_row": trial.per_row}, {}
    joined = {name: np.concatenate([array, trial.second[name]]) for name, array in trial.first.items()}
    return {"per_row": True}, joined


def _is_ours(predictor: Predictor) -> bool:
    return type(predictor).__module__.startswith("kindler.models.")
