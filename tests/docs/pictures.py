"""Makes pictures of the documentation from what they show: `python -m tests.docs.pictures`.

A small program trains and stores a model in a terminal of its own; Chromium then takes pictures of that
terminal and of the server's web page. Nothing compares the pictures: run it again when what they show has
changed.
"""

from __future__ import annotations

import html
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from fcntl import ioctl
from pathlib import Path
from typing import Any

from tests.serve.served import serving

IMAGES = Path(__file__).parents[2] / "docs" / "images"
_PROGRAM = """\
import sys

import numpy as np
import torch
from sklearn.datasets import load_digits

import kindler

digits = load_digits()
x, y = (digits.data / 16).astype("float32"), digits.target
cut = len(x) * 4 // 5
estimator = kindler.Estimator.from_torch(
    model=torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)),
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
    loss=torch.nn.CrossEntropyLoss(),
    metrics=["accuracy"],
    workers=2,
)
history = estimator.fit((x[:cut], y[:cut]), epochs=8, batch_size=64, validation_data=(x[cut:], y[cut:]))
history.plot(sys.argv[2])
om = kindler.Store(sys.argv[1])
for tags in ([], ["prod"]):
    om.models.put(estimator, "digits", tag=tags or None)
om.datasets.put(x[cut:], "digits/test")
om.close()
"""
_TERMINAL = """\
<body style="margin:0"><pre id="terminal" style="display:inline-block;margin:0;padding:16px 20px;
background:#1e2129;color:#e4e7eb;font:14px/1.5 ui-monospace,'DejaVu Sans Mono',monospace">{}</pre></body>
"""
_COLUMNS = 170


def main() -> int:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        store = Path(folder) / "store"
        printed = _in_a_terminal(store)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(device_scale_factor=2)
        page.set_content(_TERMINAL.format(html.escape(f"$ python train.py\n{printed}")))
        page.locator("#terminal").screenshot(path=IMAGES / "progress.png")
        with serving(store) as server:
            for name, width, height in (("page", 1280, 960), ("page-phone", 390, 844)):
                _of_the_page(browser, server.url, IMAGES / f"{name}.png", width, height)
        browser.close()
    return 0


def _in_a_terminal(store: Path) -> str:
    """Run the program; what its terminal shows at the end."""
    own, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, _COLUMNS, 0, 0))
    command = [sys.executable, "-c", _PROGRAM, str(store), str(IMAGES / "history.png")]
    running = subprocess.Popen(command, stdout=its, stderr=its, env={**os.environ, "COLUMNS": str(_COLUMNS)})
    os.close(its)
    read = b""
    while True:
        try:
            some = os.read(own, 65536)
        except OSError:  # the other end is closed
            break
        if not some:
            break
        read += some
    os.close(own)
    if running.wait() != 0:
        raise RuntimeError(read.decode(errors="replace"))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", read.decode(errors="replace")).replace("\r\n", "\n")
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return "\n".join(line for line in lines if line)


def _of_the_page(browser: Any, url: str, path: Path, width: int, height: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, device_scale_factor=1)
    page = context.new_page()
    page.goto(f"{url}/#/b/default/models/digits")
    page.wait_for_selector("main:not([aria-busy]) h1")
    page.wait_for_load_state("networkidle")
    page.screenshot(path=path)
    context.close()


if __name__ == "__main__":
    sys.exit(main())
