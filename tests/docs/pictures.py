"""Makes pictures of the documentation from what they show: `python -m tests.docs.pictures`.

The README's example runs in a terminal of its own, and cells run in a kernel of IPython; Chromium takes
pictures of what they show, and of the server's web page. Nothing compares the pictures: run it again when
what they show has changed. The drawings in SVG are written by hand, but for the chart of benchmarks/_page.py.
"""

from __future__ import annotations

import copy
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

import nbformat
from nbclient import NotebookClient

from tests.serve.served import serving

IMAGES = Path(__file__).parents[2] / "docs" / "images"
EXAMPLE = Path(__file__).parents[2] / "examples" / "first_steps.py"
_STORE = """\
import sys

from sklearn.datasets import load_digits

import kindler
import torch

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
estimator.fit((x[:cut], y[:cut]), epochs=8, batch_size=64, validation_data=(x[cut:], y[cut:]), verbose=0)
om = kindler.Store(sys.argv[1])
for tags in ([], ["prod"]):
    om.models.put(estimator, "digits", tag=tags or None)
om.datasets.put(x[cut:], "digits/test")
om.close()
"""
_CELLS = (
    """\
import numpy as np
import torch
from sklearn.datasets import load_digits

import kindler

digits = load_digits()
images = np.tile((digits.data / 16).astype("float32"), (40, 1))
labels = np.tile(digits.target, 40)""",
    """\
estimator = kindler.Estimator.from_torch(
    model=lambda: torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
    ),
    optimizer=lambda model: torch.optim.Adam(model.parameters()),
    loss=torch.nn.CrossEntropyLoss(),
    metrics=["accuracy"],
    workers=2,
)
history = estimator.fit((images, labels), epochs=4, batch_size=64)""",
)
_TERMINAL = """\
<body style="margin:0"><pre id="picture" style="display:inline-block;margin:0;padding:14px 18px;
background:#1e2129;color:#e4e7eb;font:14px/1.45 'DejaVu Sans Mono',monospace">{}</pre></body>
"""
_NOTEBOOK = """\
<style>
  body{margin:0} #picture{display:inline-block;width:800px;padding:10px 14px;background:#fff;color:#1f2328}
  .cell{display:grid;grid-template-columns:64px 1fr;margin:6px 0;font:13px/1.45 'DejaVu Sans Mono',monospace}
  .mark{color:#307fc1} pre{margin:0;padding:6px 8px;background:#f6f8fa;border:1px solid #d8dee4;font:inherit}
  .out{grid-column:2;padding:3px 8px} .out code{font:inherit} progress{accent-color:#307fc1;width:110px}
</style>
<div id="picture">%s</div>
"""
_COLUMNS = 126


def main() -> int:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        printed = _in_a_terminal(Path(folder))
        shutil.copy(Path(folder) / "history.png", IMAGES)
        before_the_table = printed.partition("\n+--")[0]
        shown = html.escape(f"$ python {EXAMPLE.name}\n{before_the_table}")
        _picture(browser, _TERMINAL.format(shown), IMAGES / "progress.png")
        _picture(browser, _NOTEBOOK % _in_a_notebook(), IMAGES / "progress-notebook.png")
        store = Path(folder) / "store"
        subprocess.run([sys.executable, "-c", _STORE, str(store)], check=True)
        with serving(store) as server:
            for name, width, height in (("page", 1280, 960), ("page-phone", 390, 844)):
                _of_the_page(browser, server.url, IMAGES / f"{name}.png", width, height)
        browser.close()
    return 0


def _picture(browser: Any, content: str, path: Path) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 900}, device_scale_factor=2)
    page.set_content(content)
    page.locator("#picture").screenshot(path=path)
    page.close()


def _in_a_terminal(folder: Path) -> str:
    """Run the example; what its terminal shows at the end."""
    own, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, _COLUMNS, 0, 0))
    command = [sys.executable, str(EXAMPLE)]
    environment = {**os.environ, "COLUMNS": str(_COLUMNS)}
    running = subprocess.Popen(command, stdout=its, stderr=its, cwd=folder, env=environment)
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
    return "\n".join(line for line in lines if line and not line.startswith("WARNING: Using incubator"))


def _in_a_notebook() -> str:
    """Run the cells in a kernel; what they show in the middle of the third epoch."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in _CELLS])
    seen: list[list[Any]] = []

    class Watched(NotebookClient):
        def process_message(self, message: Any, cell: Any, cell_index: int) -> Any:
            output = super().process_message(message, cell, cell_index)
            bar = re.search(r'value="(\d+)" max="(\d+)"', str(message["content"].get("data", {})))
            if bar and "epoch 3 of 4" in str(message["content"]) and 0.4 < int(bar[1]) / int(bar[2]) < 0.9:
                seen.append(copy.deepcopy(cell.outputs))
            return output

    Watched(notebook, timeout=300, kernel_name="python3").execute()
    if not seen:
        raise RuntimeError("the third epoch showed no bar in its middle")
    drawn = []
    for number, cell in enumerate(_CELLS, 1):
        running = number == len(_CELLS)
        drawn.append(f"<div class=cell><span class=mark>[{'*' if running else number}]:</span>")
        drawn.append(f"<pre>{html.escape(cell)}</pre>")
        outputs = seen[0] if running else []
        drawn += [f"<div class=out>{one.data['text/html']}</div>" for one in outputs if "data" in one]
        drawn.append("</div>")
    return "".join(drawn)


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
