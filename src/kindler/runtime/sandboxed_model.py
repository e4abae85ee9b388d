"""A model in a sandboxed process, for workers that trust nobody.

The worker itself reads and writes the store, and cannot be sandboxed. So what strangers have stored is read,
and called, by a process of its own, which has nothing but the files of the version. It is used like a
`LoadedModel`. What it answers is passed on as it came: a worker does not read it.
"""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
_FAILURE = "failure"


class Encoded(tuple[bytes, ...]):
    """A result as `value_codec.encode` wrote it, in a process that is not trusted."""

    __slots__ = ()


def can_be_sandboxed(version: Version) -> bool:
    """Whether a version of a model is called by a sandboxed process: see `Kinds.sandboxed`."""
    return MODEL_KINDS.sandboxed(str(version), version.kind, version.meta, sandbox.unavailable_reason())


def load(options: Fields) -> tuple[Fields, Handler]:
    """The target of the process. It loads the model at the first call, so that what that raises is reported
    like what any call raises."""
    loaded: list[LoadedModel] = []

    def handle(fields: Fields, parts: dict[str, Any]) -> tuple[Fields, dict[str, Any]]:
        try:
            if not loaded:
                folder, meta = Path(options["folder"]), options["meta"]
                loaded.append(load_files(options["kind"], folder, meta, trusted=False))
                return {}, {}
            data, keywords = value_codec.decode([parts[str(i)] for i in range(len(parts))])
            buffers = value_codec.encode(loaded[0].call(fields["verb"], *data, **keywords))
            size = sum(map(len, buffers))
            if size > _ANSWER_BYTES:
                raise DataError(
                    f"the result has {size} bytes; a worker accepts at most {_ANSWER_BYTES} from an"
                    f" untrusted model.\nHint: predict fewer rows at a time."
                )
            return {}, {str(i): buffer for i, buffer in enumerate(buffers)}
        except BaseException as exc:  # noqa: BLE001 - whatever a model raises is for whoever sent the task
            return {}, {_FAILURE: json.dumps(described(exc)).encode()}

    return {}, handle


class SandboxedModel:
    """A model in a process of its own, loaded from the files in `folder`."""

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
            printed=_print,
        )
        with self._reporting_loss():
            self._process = BlockingProcess(start)
        self.close = weakref.finalize(self, self._process.close)
        try:
            self._ask("", ())
        except BaseException:
            self.close()
            raise

    def call(self, verb: str, /, *data: Any, **options: Any) -> Encoded:
        """Run a verb: see `LoadedModel.call`."""
        return self._ask(verb, value_codec.encode([list(data), options]))

    def _ask(self, verb: str, buffers: Sequence[bytes]) -> Encoded:
        with self._reporting_loss():
            parts = {str(i): [buffer] for i, buffer in enumerate(buffers)}
            outputs = self._process.call({"verb": verb}, parts).outputs
            if not all(type(part) is bytes for part in outputs.values()):
                raise ValueError("no answer of a model")
            if _FAILURE not in outputs:
                return Encoded(outputs[str(i)] for i in range(len(outputs)))
            error = json.loads(check_json(outputs[_FAILURE]))
            if not isinstance(error, dict):
                raise ValueError("no error of a model")
        raise Report("failed", error=error).exception()

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


def _print(said: bytes) -> None:
    """Makes what the process prints part of the task's log."""
    with suppress(OSError):  # nobody reads it any more
        os.write(1, said)


def _memory_of(version: Version) -> int:
    """Half of the machine's memory, or less if that was stored with the version."""
    limits = version.attributes.get("limits")
    asked = limits.get("memory_bytes") if isinstance(limits, Mapping) else None
    return min(half_of_memory(), asked if type(asked) is int and asked > 0 else half_of_memory())
