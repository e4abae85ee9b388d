"""A matplotlib figure that a notebook shows as the value of a cell, whether or not pyplot is in use."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=100)
        return file.getvalue()
