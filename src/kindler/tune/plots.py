"""A study as a picture: its trials, their epochs, and what each parameter does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optuna
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kindler.train.figures import ShownFigure

_ACROSS = 3
_DECADES = 100.0  # values further apart than this are drawn on a logarithmic axis


def draw(study: optuna.Study, rows: Sequence[dict[str, Any]]) -> Figure:
    """The figure; at least one row must have a value."""
    trials = study.get_trials(deepcopy=False)
    params = sorted({name for trial in trials for name in trial.params})
    curves = [trial.intermediate_values for trial in trials if len(trial.intermediate_values) > 1]
    panels = 1 + bool(curves) + len(params)
    down = -(-panels // _ACROSS)
    figure = ShownFigure(figsize=(4.5 * min(panels, _ACROSS), 3.4 * down), layout="constrained")
    places = list(figure.subplots(down, min(panels, _ACROSS), squeeze=False).ravel())
    for unused in places[panels:]:
        unused.remove()
    _trials(places[0], study, rows)
    if curves:
        _epochs(places[1], curves)
    for axes, name in zip(places[1 + bool(curves) :], params, strict=False):
        _param(axes, study, name)
    values = [row["value"] for row in rows if row["value"] is not None]
    wide = min(values) > 0 and max(values) / min(values) > _DECADES
    for axes in places[:panels]:
        axes.set_ylabel(study.user_attrs.get("metric", "value"))
        axes.set_yscale("log" if wide else "linear")
        axes.grid(alpha=0.3)
    return figure


def _trials(axes: Any, study: optuna.Study, rows: Sequence[dict[str, Any]]) -> None:
    for state, marker in (("finished", "o"), ("cut short", "x")):
        shown = [row for row in rows if row["state"] == state and row["value"] is not None]
        if shown:
            numbers = [row["number"] for row in shown]
            axes.plot(numbers, [row["value"] for row in shown], marker, markersize=4, label=state)
    pick = min if study.direction == optuna.study.StudyDirection.MINIMIZE else max
    finished = [row for row in rows if row["state"] == "finished"]
    best = [pick(row["value"] for row in finished[: i + 1]) for i in range(len(finished))]
    if best:
        axes.step([row["number"] for row in finished], best, where="post", label="best")
    axes.set(title="trials", xlabel="trial")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


def _epochs(axes: Any, curves: Sequence[dict[int, float]]) -> None:
    for curve in curves:
        epochs = sorted(curve)
        axes.plot(epochs, [curve[epoch] for epoch in epochs], linewidth=1, alpha=0.6)
    axes.set(title="epochs", xlabel="epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _param(axes: Any, study: optuna.Study, name: str) -> None:
    shown = [t for t in study.get_trials(deepcopy=False) if name in t.params and t.value is not None]
    values = [t.params[name] for t in shown]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    across = values if numeric else [str(value) for value in values]
    axes.plot(across, [t.value for t in shown], "o", markersize=4)
    axes.set(title=name, xlabel=name)
    if any(getattr(t.distributions[name], "log", False) for t in shown):
        axes.set_xscale("log")
