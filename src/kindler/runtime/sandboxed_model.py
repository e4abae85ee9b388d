"""A model in a sandboxed process, for workers that trust nobody.

The worker itself reads and writes the store, and cannot be sandboxed. So what strangers have stored is read,
and called, by a process of its own, which has nothing but the files of the version. It is used like a
`LoadedModel`. What it answers is passed on as it came: a worker does not read it.
"""

from __future__ import annotations

import codecs
import json
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kindler import sandbox
from kindler.data.received import check_json
from kindler.engine.placement import half_of_memory
from kindler.errors import DataError, WorkerLostError
from kindler.models.loaded import LoadedModel, load_files, process_recipe
from kindler.models.registry import MODEL_KINDS
from kindler.runtime import value_codec
from kindler.runtime.messages import Report, described
from kindler.sandbox.child import Fields, Handler
from kindler.sandbox.process import BlockingProcess, ProcessLost, Start
from kindler.store import Version

_START_S = _IDLE_S = 300.0
_ANSWER_BYTES, _SPARE_BYTES = 1 << 30, 16 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """A result as `value_codec.encode` wrote it, by a process that nobody trusts."""

    value: Any
    buffers: tuple[bytes, ...]


def can_be_sandboxed(version: Version) -> bool:
    """Whether a version of a model is called by a sandboxed process: see `Kinds.sandboxed`."""
    return MODEL_KINDS.sandboxed(str(version), version.kind, version.meta, sandbox.unavailable_reason())


def load(options: Fields) -> tuple[Fields, Handler]:
    """The target of the process. It loads the model at the first call, so that what that raises is told
    like what any call raises."""
    loaded: list[LoadedModel] = []

    def handle(_: Fields, parts: dict[str, Any]) -> tuple[Fields, dict[str, Any]]:
        try:
            if not loaded:
                folder, meta = Path(options["folder"]), options["meta"]
                loaded.append(load_files(options["kind"], folder, meta, trusted=False))
                return _packed({"value": None}, ())
            asked = json.loads(parts.pop("message"))
            data, keywords = value_codec.decode(asked["arguments"], list(parts.values()))
            value, buffers = value_codec.encode(loaded[0].call(asked["verb"], *data, **keywords))
            size = sum(map(len, buffers))
            if size > _ANSWER_BYTES:
                raise DataError(
                    f"the result takes {size} bytes; a worker takes {_ANSWER_BYTES} of a model that is not"
                    " trusted.\nHint: predict fewer rows at a time."
                )
            return _packed({"value": value}, buffers)
        except BaseException as exc:  # noqa: BLE001 - whatever a model raises is told to whoever sent the task
            return _packed({"error": described(exc)}, ())

    return {}, handle


def _packed(message: Mapping[str, Any], buffers: Sequence[bytes]) -> tuple[Fields, dict[str, Any]]:
    """Not as fields of a message, whose numbers are JSON's."""
    return {}, {"message": json.dumps(message).encode(), **{str(i): one for i, one in enumerate(buffers)}}


class SandboxedModel:
    """A model in a process of its own.

    Args:
        version: Which.
        folder: Where its files lie while it is loaded.

    Attributes:
        is_gone: Whether its process was lost.

    Raises:
        KindlerError: It cannot be loaded.
    """

    def __init__(self, version: Version, folder: Path) -> None:
        self._name = str(version)
        self.is_gone = False
        start = Start(
            recipe=process_recipe(version, sandboxed=True, idle_s=_IDLE_S),
            target="kindler.runtime.sandboxed_model:load",
            options={"kind": version.kind, "folder": str(folder), "meta": dict(version.meta)},
            readable=(str(folder),),
            load_s=_START_S,
            call_s=None,
            memory_bytes=_memory_of(version),
            output_bytes=_ANSWER_BYTES + _SPARE_BYTES,
            printed=_printer(),
        )
        with self._reporting_loss():
            self._process = BlockingProcess(start)
        self.close = weakref.finalize(self, self._process.close)
        try:
            self._ask({}, ())
        except BaseException:
            self.close()
            raise

    def call(self, verb: str, /, *data: Any, **options: Any) -> Encoded:
        """Run a verb: see `LoadedModel.call`.

        Raises:
            KindlerError: What it raised.
        """
        tree, buffers = value_codec.encode([list(data), options])
        return self._ask({"verb": verb, "arguments": tree}, buffers)

    def _ask(self, message: Mapping[str, Any], buffers: Sequence[bytes]) -> Encoded:
        _, parts = _packed(message, buffers)
        with self._reporting_loss():
            outputs = self._process.call({}, {name: [part] for name, part in parts.items()}).outputs
            answer = json.loads(check_json(outputs.pop("message")))
            found = Encoded(answer.get("value"), tuple(outputs[str(i)] for i in range(len(outputs))))
            error = answer.get("error")
            if not isinstance(error, dict | None) or not all(type(one) is bytes for one in found.buffers):
                raise ValueError("no answer of a model")
        if error is not None:
            raise Report("failed", error=error).exception()
        return found

    @contextmanager
    def _reporting_loss(self) -> Iterator[None]:
        try:
            yield
        except (ProcessLost, KeyError, ValueError, TypeError, AttributeError, RecursionError) as exc:
            if hasattr(self, "close"):
                self.close()
            self.is_gone = True
            reason = exc.reason if isinstance(exc, ProcessLost) else f"sent a malformed reply ({exc})"
            raise WorkerLostError(
                f"the sandboxed process of {self._name} {reason}",
                rank=None,
                host=socket.gethostname(),
                exit_code=getattr(exc, "exit_code", None),
            ) from exc


def _printer() -> Callable[[bytes], None]:
    """Makes what the process prints part of the task's log."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def write(said: bytes) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            sys.stdout.write(decode(said))
            sys.stdout.flush()

    return write


def _memory_of(version: Version) -> int:
    """Half of the machine's memory, or less if that was stored with the version."""
    limits = version.attributes.get("limits")
    asked = limits.get("memory_bytes") if isinstance(limits, Mapping) else None
    return min(half_of_memory(), asked if type(asked) is int and asked > 0 else half_of_memory())
