"""What the processes of `test_sandbox_process.py` load."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any


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
