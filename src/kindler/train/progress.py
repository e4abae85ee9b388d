"""The progress bar on the driver, and the lines that workers print.

A terminal or a notebook shows a bar per epoch, redrawn in place; a file or a pipe gets one line per epoch.
Before the first step, a line shows rows on their way from Spark.
"""

from __future__ import annotations

import html
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from kindler import limits
from kindler.train.metric_names import BOOKKEEPING

_SHOWN_FIGURES = 6
_BAR = "{desc}: {percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt} {unit}{postfix}"


class ProgressBar:
    """Draws a bar per epoch from what workers report; `verbose=0` shows nothing."""

    def __init__(
        self,
        *,
        verbose: int,
        what: str = "epoch",
        unit: str = "steps",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verbose = verbose
        self._unit = unit
        self._what = what
        self._stream = stream
        self._clock = clock
        self._bar: Any = None
        self._last: dict[str, Any] = {}
        self._first_step = 0
        self._bar_began = 0.0
        self._began: float | None = None
        self._epoch_s: float | None = None
        self._ingest = _IngestLine(stream, clock)
        self._thread = _thread()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        # The bar of an epoch that is still open is one that an interrupt has ended.
        if exc is None and self._what != "epoch" and self._bar is not None and self._bar.total is not None:
            self._bar.update(self._bar.total - self._bar.n)
        self._close()
        self._ingest.end()

    def log(self, rank: int, line: str) -> None:
        self.note(f"[worker {rank}] {line}")

    def note(self, line: str) -> None:
        if self._verbose:
            from tqdm import tqdm

            tqdm.write(f"{self._thread}{line}")
            sys.stdout.flush()  # a line at a time: Java writes to the same pipe

    def report(self, fields: Mapping[str, Any]) -> None:
        if not self._verbose:
            return
        if fields["name"] == "ingest":
            self._ingest.report(fields)
            return
        if fields["name"] in ("progress", "epoch"):
            self._ingest.end()
        if fields["name"] == "progress":
            self._draw(dict(fields))
        elif fields["name"] == "epoch":
            self._finish(fields["row"], whole=fields.get("whole", True))

    def result(self, row: Mapping[str, Any]) -> None:
        if self._bar is not None:
            self._describe(figures(row))

    def _draw(self, fields: dict[str, Any]) -> None:
        if not self._last or fields.get("epoch") != self._last.get("epoch"):
            self._begin(fields)
        self._last = fields
        if self._bar is None:
            return
        fields.setdefault("seconds", self._clock() - self._bar_began)
        if self._unit == "rows":
            fields.setdefault("rows", fields["step"])
        parts = _running(fields, self._first_step, self._epoch_s)
        self._describe(parts)
        self._bar.update(fields["step"] - self._bar.n)

    def _describe(self, parts: list[str]) -> None:
        """Write the parts behind the bar: in a terminal those that fit, so that no number is cut in two."""
        bar = self._bar
        columns = None if isinstance(bar, _NotebookBar) else bar.format_dict["ncols"]
        if columns:
            before = f"{bar.desc}: 100%|{'':12}| {bar.total}/{bar.total} {bar.unit}, "
            while len(parts) > 1 and len(before) + len(" · ".join(parts)) > columns:
                parts = parts[:-1]
        bar.set_postfix_str(" · ".join(parts), refresh=False)

    def _begin(self, fields: dict[str, Any]) -> None:
        self._close()
        self._first_step, self._bar_began = fields["step"], self._clock()
        self._began = self._clock() if self._began is None else self._began
        stream = self._stream or sys.stderr
        if _in_notebook():
            self._bar = _NotebookBar(total=fields["steps"], desc=self._label(fields), unit=self._unit)
        elif _is_terminal(stream):
            from tqdm import tqdm

            self._bar = tqdm(
                total=fields["steps"],
                desc=self._label(fields),
                unit=self._unit,
                bar_format=_BAR,
                dynamic_ncols=True,
                mininterval=0,  # reports are seldom enough
                miniters=1,
                file=stream,
            )

    def _finish(self, row: Mapping[str, Any], *, whole: bool) -> None:
        now = self._clock()
        if self._began is not None:
            self._epoch_s, self._began = now - self._began, now
        if self._bar is not None:
            self._describe(_done(row, self._last))
            steps = row.get("steps", 0)
            self._bar.update((self._bar.total or steps if whole else steps) - self._bar.n)
        elif not _in_notebook() and not _is_terminal(stream := self._stream or sys.stderr):
            label = self._label({**self._last, "epoch": row.get("epoch", self._last.get("epoch"))})
            time_taken, *parts = _done(row, self._last)
            line = " · ".join([f"{label}: {row.get('steps', 0):,} steps in {time_taken}", *parts])
            stream.write(f"{line}\n")
            stream.flush()
        self._close()
        self._last = {}

    def _label(self, fields: Mapping[str, Any]) -> str:
        if self._what != "epoch":
            return f"{self._thread}{self._what}"
        of_all = f" of {fields['epochs']:,}" if fields.get("epochs") else ""
        return f"{self._thread}epoch {fields['epoch']:,}{of_all}"

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def show_line(line: str, *, verbose: int) -> None:
    """Show a line below the bars."""
    if not verbose:
        return
    if _in_notebook():
        _display(f"{_thread()}{line}")
    else:
        sys.stderr.write(f"{_thread()}{line}\n")
        sys.stderr.flush()


def _thread() -> str:
    thread = threading.current_thread()
    return "" if thread is threading.main_thread() else f"{thread.name}: "


class _NotebookBar:
    """One output of a cell that changes in place; has the interface of tqdm's bars."""

    def __init__(self, *, total: int | None, desc: str, unit: str) -> None:
        self.total, self.n = total, 0
        self._desc, self._unit, self._postfix = desc, unit, ""
        self._handle: Any = None
        self._show()

    def set_postfix_str(self, text: str, refresh: bool = False) -> None:
        self._postfix = text

    def update(self, more: int) -> None:
        self.n += more
        self._show()

    def close(self) -> None:
        """The last drawing stays."""

    def _show(self) -> None:
        count = f"{self.n:,}/{self.total:,}" if self.total is not None else f"{self.n:,}"
        text = f"{self._desc}: {count} {self._unit}" + (f", {self._postfix}" if self._postfix else "")
        bar = f'<progress value="{self.n}" max="{self.total}"></progress> ' if self.total else ""
        self._handle = _display(text, bar, self._handle)


def _display(text: str, bar: str = "", handle: Any = None) -> Any:
    """Show a line in a notebook's cell, in the place of `handle` if there is one; return its own."""
    shown = {"text/html": f"{bar}<code>{html.escape(text)}</code>", "text/plain": text}
    if handle is None:
        return sys.modules["IPython"].display.display(shown, raw=True, display_id=True)
    handle.update(shown, raw=True)
    return handle


def _in_notebook() -> bool:
    """Whether this process is a notebook kernel, which shows HTML and can change it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class _IngestLine:
    """Shows rows on their way from Spark to the workers, in one line, until `end`.

    A terminal line is redrawn in place; elsewhere it is printed every ten seconds, and never for rows that
    come sooner.
    """

    def __init__(self, stream: TextIO | None, clock: Callable[[], float]) -> None:
        self._stream, self._clock = stream, clock
        self._computed: Mapping[str, Any] = {}
        self._received: dict[int, tuple[int, int]] = {}
        self._due: float | None = None
        self._shown = False

    def report(self, fields: Mapping[str, Any]) -> None:
        now, in_place = self._clock(), _is_terminal(self._stream or sys.stderr)
        if fields["stage"] == "computed":
            self._computed = fields
        else:
            self._received[fields["worker"]] = (fields["rows"], fields["bytes"])
        if self._due is None:
            self._due = now + (limits.INGEST_FIRST_S if in_place else limits.INGEST_PRINTED_S)
        if now >= self._due:
            self._due = now + (limits.INGEST_REDRAWN_S if in_place else limits.INGEST_PRINTED_S)
            self._shown = True
            self._show(in_place)

    def end(self) -> None:
        if self._shown:
            in_place = _is_terminal(self._stream or sys.stderr)
            self._show(in_place)
            if in_place:
                (self._stream or sys.stderr).write("\n")
        self._computed, self._received, self._due, self._shown = {}, {}, None, False

    def _show(self, in_place: bool) -> None:
        stream, text = self._stream or sys.stderr, ingest_text(self._computed, list(self._received.values()))
        stream.write(f"\r\x1b[2K{text}" if in_place else f"{text}\n")
        stream.flush()


def ingest_text(computed: Mapping[str, Any], received: list[tuple[int, int]]) -> str:
    """Rows that Spark's tasks have computed, then the rows and bytes that workers received.

    >>> ingest_text({"rows": 1500, "bytes": 2_500_000, "done_tasks": 3, "tasks": 16}, [])
    'rows from Spark: 1,500 computed (2.5 MB, 3 of 16 tasks)'
    >>> ingest_text({"rows": 0, "bytes": 0, "done_tasks": 0, "tasks": 16}, [])
    'rows from Spark: 0 of 16 tasks done'
    >>> ingest_text({"rows": 3000}, [(500, 4000), (700, 5600)])
    'rows from Spark: 1,200 of 3,000 received (9.6 kB)'
    """
    if not received:
        tasks = f"{computed['done_tasks']} of {computed['tasks']} tasks"
        if not computed["rows"]:  # Spark counts the rows of a task when it is done
            return f"rows from Spark: {tasks} done"
        return f"rows from Spark: {computed['rows']:,} computed ({_size(computed['bytes'])}, {tasks})"
    rows, size = (sum(each[i] for each in received) for i in (0, 1))
    total = max(rows, computed.get("rows", 0))
    whole = f" of {total:,}" if total > rows else ""
    return f"rows from Spark: {rows:,}{whole} received ({_size(size)})"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def figures(values: Mapping[str, Any]) -> list[str]:
    """The metrics to show, each as "name value".

    >>> figures({"epoch": 1, "loss": 0.123456, "accuracy": 1})
    ['loss 0.1235', 'accuracy 1']
    """
    shown = [(k, v) for k, v in values.items() if k not in BOOKKEEPING and isinstance(v, int | float)]
    return [f"{name} {value:.4g}" for name, value in shown[:_SHOWN_FIGURES]]


def shares(fields: Mapping[str, Any]) -> str | None:
    """The shares of data (or a transform), compute and sync in percent; None if they were not reported.

    >>> shares({"seconds": 10.0, "data_s": 0.3, "sync_s": 1.2})
    'data 3% · compute 85% · sync 12%'
    >>> shares({"seconds": 10.0, "transform_s": 4.0, "sync_s": 1.0})
    'transform 40% · compute 50% · sync 10%'
    """
    what = "transform" if "transform_s" in fields else "data"
    seconds, data_s, sync_s = (fields.get(key) for key in ("seconds", f"{what}_s", "sync_s"))
    if not seconds or data_s is None or sync_s is None:
        return None
    data, sync = (round(100 * min(1.0, part / seconds)) for part in (data_s, sync_s))
    return f"{what} {data}% · compute {max(0, 100 - data - sync)}% · sync {sync}%"


def remaining(
    fields: Mapping[str, Any], first_step: int = 0, epoch_s: float | None = None
) -> tuple[float | None, float | None]:
    """Seconds left of the epoch and of the run; None if they cannot be estimated yet.

    `epoch_s` is the duration of the previous epoch, validation included.
    """
    steps, seconds = fields["step"] - first_step, fields.get("seconds")
    if steps <= 0 or not seconds or fields["steps"] is None:
        return None, None
    epoch_left = seconds / steps * (fields["steps"] - fields["step"])
    if not fields.get("epochs"):
        return epoch_left, None
    whole = epoch_s if epoch_s is not None else seconds / steps * fields["steps"]
    return epoch_left, epoch_left + (fields["epochs"] - fields["epoch"]) * whole


def _running(fields: Mapping[str, Any], first_step: int, epoch_s: float | None) -> list[str]:
    """The parts of the line of a running epoch."""
    epoch_left, run_left = remaining(fields, first_step, epoch_s)
    times = []
    if epoch_left is not None:
        times.append(f"{clock_time(fields['seconds'])}, {clock_time(epoch_left)} left")
        if run_left is not None and fields["epochs"] > fields["epoch"]:
            times[0] += f" ({clock_time(run_left)} of the run)"
    loss = {} if fields.get("loss") is None else {"loss": fields["loss"]}
    rate = fields["rows"] / fields["seconds"] if fields.get("rows") and fields.get("seconds") else None
    return times + _metrics({**loss, **(fields.get("metrics") or {})}, rate, fields)


def _done(row: Mapping[str, Any], last: Mapping[str, Any]) -> list[str]:
    """The parts of the line of a finished epoch; `last` is its last progress report, possibly empty."""
    return [clock_time(row.get("seconds", 0.0)), *_metrics(row, row.get("rows_per_s"), last)]


def _metrics(values: Mapping[str, Any], rows_per_s: float | None, report: Mapping[str, Any]) -> list[str]:
    rate = f"{rows_per_s:,.0f} rows/s" if rows_per_s else None
    return figures(values) + [part for part in (rate, shares(report)) if part]


def clock_time(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def _is_terminal(stream: TextIO) -> bool:
    isatty = getattr(stream, "isatty", None)
    return bool(isatty is not None and isatty())
