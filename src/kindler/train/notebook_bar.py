"""A progress bar in a notebook, which needs no package but the notebook's own IPython."""

from __future__ import annotations

import html
import sys
from typing import Any


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows HTML and can change it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookBar:
    """One output of a cell that changes while a pass runs; used as tqdm's bars are.

    Attributes:
        total: What it counts to; None if that is not known.
        n: How far it is.
    """

    def __init__(self, *, total: int | None, desc: str, unit: str) -> None:
        self.total, self.n = total, 0
        self._desc, self._unit, self._postfix = desc, unit, ""
        self._handle: Any = None
        self._show()

    def set_postfix_str(self, text: str, refresh: bool = False) -> None:
        """What stands after the count, from the next update on."""
        self._postfix = text

    def update(self, more: int) -> None:
        """Count on, and draw it."""
        self.n += more
        self._show()

    def close(self) -> None:
        """What was drawn last stays."""

    def _show(self) -> None:
        display: Any = sys.modules["IPython"].display.display
        count = f"{self.n:,}/{self.total:,}" if self.total is not None else f"{self.n:,}"
        text = f"{self._desc}: {count} {self._unit}" + (f", {self._postfix}" if self._postfix else "")
        bar = f'<progress value="{self.n}" max="{self.total}"></progress> ' if self.total else ""
        shown = {"text/html": f"{bar}<code>{html.escape(text)}</code>", "text/plain": text}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
