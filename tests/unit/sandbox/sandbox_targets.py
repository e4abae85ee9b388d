"""What the processes of `test_sandbox_process.py` load."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any


class Later:
    """A call that is computed once another has begun, as by something that computes beside the process."""

    begun = 0

    def __init__(self, needs: int, answer: tuple[dict[str, Any], dict[str, Any]]) -> None:
        type(self).begun += 1
        self.needs, self.answer = needs, answer

    def is_ready(self) -> bool:
        return self.begun >= self.needs

    def wait(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.answer[0].get("raises"):
            raise ValueError(self.answer[0]["raises"])
        return self.answer


def load_later(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    def handle(fields: dict[str, Any], parts: dict[str, Any]) -> Later:
        return Later(fields["needs"], (fields, {name: part * 2 for name, part in parts.items()}))

    return {}, handle


def load(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    if "refused" in options:
        raise KeyError(options["refused"])

    def handle(fields: dict[str, Any], parts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        if fields.get("prints"):
            sys.stdout.write(fields["prints"])
        if "takes" in fields:
            len(bytes(fields["takes"]))
        if fields.get("hangs"):
            threading.Event().wait()
        if fields.get("raises"):
            raise ValueError(fields["raises"])
        answer = {"pid": os.getpid(), "parts": sorted(parts)}
        return answer, {name: part if isinstance(part, bytes) else part * 2 for name, part in parts.items()}

    return {"says": options["says"]}, handle
