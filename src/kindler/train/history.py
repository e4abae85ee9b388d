"""What `fit` returns: a row of metrics per epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

from kindler.errors import ConfigError, MissingExtraError
from kindler.html import table
from kindler.train.goodput import Goodput
from kindler.train.metric_names import BOOKKEEPING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_MAX_ACROSS = 4


class History(Sequence[dict[str, Any]]):
    """The epochs of a run: a sequence of dicts, which a metric's name indexes as a column.

    Each dict has epoch, steps, num_samples, loss, the metrics, "val_" versions of them, seconds and
    rows_per_s.

    Attributes:
        mode: How the last run computed its steps, where `compile` left a choice: "graphs", "torch.compile",
            "graphs of torch.compile", or "eager", with the reason if steps cannot be recorded.
        goodput: The share of the wall time of the last run that was new training steps, and what the rest
            was; None if there was no run.

    Examples:
        >>> history = History([{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25}])
        >>> history["loss"], history[-1]["epoch"], len(history)
        ([0.5, 0.25], 2, 2)
    """

    def __init__(
        self, rows: Sequence[dict[str, Any]] = (), mode: str | None = None, goodput: Goodput | None = None
    ) -> None:
        self._rows = list(rows)
        self.mode = mode
        self.goodput = goodput

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    @overload
    def __getitem__(self, index: str) -> list[Any]: ...
    def __getitem__(self, index: int | slice | str) -> dict[str, Any] | list[Any]:
        if isinstance(index, str):
            if index not in self.names:
                raise KeyError(f"no metric {index!r} in this history; available: {self.names}")
            return [row.get(index) for row in self._rows]
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"History({self._rows!r})"

    def _repr_html_(self) -> str:
        return table(self._rows, columns=self.names) if self._rows else "<i>no epochs</i>"

    @property
    def names(self) -> list[str]:
        """The recorded names, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def to_pandas(self) -> pd.DataFrame:
        """A pandas DataFrame with a row per epoch; NaN where an epoch lacks a value."""
        try:
            import pandas as pd
        except ModuleNotFoundError as exc:
            raise MissingExtraError(what="History.to_pandas()", package="pandas", extra="spark") from exc
        return pd.DataFrame(self._rows, columns=self.names)

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Plot loss and metrics over epochs.

        A metric that only some epochs have is drawn through those. Where training went back to an earlier
        epoch, a new line begins.

        Args:
            path: A file to save the plot to.

        Returns:
            The matplotlib figure, which a notebook shows as the value of a cell.

        Raises:
            ConfigError: The history is empty.
        """
        try:
            from matplotlib.ticker import MaxNLocator

            from kindler.train.figures import ShownFigure
        except ModuleNotFoundError as exc:
            raise MissingExtraError(what="History.plot()", package="matplotlib", extra="plot") from exc
        lines = {name: _line(self._rows, name) for name in self.names}
        panels = _panels([name for name, (_, values) in lines.items() if values])
        if not panels:
            raise ConfigError("nothing to plot: this history has no metrics.")
        across = min(len(panels), _MAX_ACROSS)
        down = math.ceil(len(panels) / across)
        figure = ShownFigure(figsize=(4.5 * across, 3.4 * down), layout="constrained")
        places = figure.subplots(down, across, squeeze=False).ravel()
        for unused in places[len(panels) :]:
            unused.remove()
        for axes, (title, names) in zip(places, panels.items(), strict=False):
            for name in names:
                axes.plot(*lines[name], marker="o", markersize=3, label=name)
            axes.set(title=title, xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.3)
            axes.legend()
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def _line(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    epochs: list[float] = []
    values: list[float] = []
    for number, row in enumerate(rows, start=1):
        value, epoch = row.get(name), row.get("epoch", number)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if epochs and epoch <= epochs[-1]:
            epochs.append(math.nan)
            values.append(math.nan)
        epochs.append(epoch)
        values.append(value)
    return epochs, values


def _panels(names: Sequence[str]) -> dict[str, list[str]]:
    panels: dict[str, list[str]] = {}
    for name in names:
        if name not in BOOKKEEPING:
            panels.setdefault(name.removeprefix("val_"), []).append(name)
    return panels
