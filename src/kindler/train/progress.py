"""The live line on the driver: how far the run is, and what its workers print."""

from __future__ import annotations

from types import TracebackType
from typing import Any

__all__ = ["Progress"]

_SHOWN_FIGURES = 6
_NOT_SHOWN = {"epoch", "steps", "num_samples", "seconds", "val_num_samples"}


class Progress:
    """Draws a bar per epoch from what workers report; `verbose=0` draws and prints nothing."""

    def __init__(self, *, verbose: int, what: str = "epoch", unit: str = "step") -> None:
        self._verbose = verbose
        self._unit = unit
        self._what = what
        self._bar: Any = None
        self._epoch: int | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def log(self, rank: int, line: str) -> None:
        """A line that a worker printed."""
        if self._verbose:
            from tqdm import tqdm

            tqdm.write(f"[worker {rank}] {line}")

    def report(self, fields: dict[str, Any]) -> None:
        """What a worker reported: `progress` within an epoch, or `epoch` at its end."""
        if not self._verbose:
            return
        if fields["name"] == "progress":
            self._draw(fields)
        elif fields["name"] == "epoch":
            self._finish(fields["row"])

    def _draw(self, fields: dict[str, Any]) -> None:
        if self._bar is None or fields["epoch"] != self._epoch:
            self._open(fields)
        if fields.get("loss") is not None:
            self._bar.set_postfix_str(f"loss {fields['loss']:.4f}", refresh=False)
        self._bar.update(fields["step"] - self._bar.n)

    def _open(self, fields: dict[str, Any]) -> None:
        from tqdm.auto import tqdm

        self._close()
        self._epoch = fields["epoch"]
        label = f"{self._what} {fields['epoch']}/{fields['epochs']}" if "epochs" in fields else self._what
        self._bar = tqdm(total=fields["steps"], desc=label, unit=self._unit, dynamic_ncols=True)

    def _finish(self, row: dict[str, Any]) -> None:
        if self._bar is not None:
            shown = [(k, v) for k, v in row.items() if k not in _NOT_SHOWN][:_SHOWN_FIGURES]
            self._bar.set_postfix_str(", ".join(f"{k} {v:,.4g}" for k, v in shown), refresh=False)
            self._bar.update(self._bar.total - self._bar.n)
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
