"""What warm processes do ahead of need: they import, and never ask for a GPU, so that their forks can."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.unit.watched_devices import preload_watched

pytestmark = pytest.mark.torch


def test_preloading_torch_imports_the_compiler_and_asks_cuda_for_nothing() -> None:
    asked = preload_watched(
        "torch", ["kindler.frameworks.torch.replica:preload", "torchmetrics"], then="torch._dynamo"
    )

    assert asked == {"calls": [], "then": True}


def test_the_watch_notices_an_optimizer_that_asks_for_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)  # Lightning sets it when imported
    (tmp_path / "asks.py").write_text("import torch\ntorch.cuda.is_available()\n")

    asked = preload_watched("torch", ["asks"], path=tmp_path)

    assert asked["calls"] == ["torch._C._cuda_getDeviceCount"]


def test_what_opens_a_device_when_imported_is_imported_in_each_fork_instead(tmp_path: Path) -> None:
    """The warm process begins again without it; its forks then open the device themselves."""
    (tmp_path / "opens.py").write_text(
        textwrap.dedent(f"""
        import os
        import sys
        main = sys.modules["__main__"]
        main.holds_accelerator = lambda: True
        with open({str(tmp_path / "pids")!r}, "a") as file:
            file.write(f"{{os.getpid()}}\\n")
        """)
    )
    code = f"""
        import json, os, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from kindler.engine import fork_server
        recipe = fork_server.Recipe(preload=("opens",))
        children = [fork_server.start_child(recipe, owner=os.getpid(), timeout_s=60) for _ in range(2)]
        for child in children:
            child.channel.send("job", target="kindler.engine.worker:nothing")  # it fails, having imported
            child.wait(60)
        print(json.dumps([child.pid for child in children]), fork_server._started[0].pid)
        fork_server.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    children, _, warm = done.stdout.strip().rpartition(" ")
    pids = (tmp_path / "pids").read_text().split()
    assert pids[0] == warm, "it was imported, and found to open the device"
    assert sorted(pids[1:]) == sorted(children.strip("[]").split(", ")), "then once in each fork"
