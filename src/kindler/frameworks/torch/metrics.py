"""Tallies of loss, rows and metrics that merge exactly over ranks; reading them executes nothing.

torchmetrics metrics merge by states and reductions, plain functions are averaged by rows, and those with a
name (`named_metrics.py`) report how many values they counted, or keep a state.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kindler.errors import ConfigError, DataError
from kindler.frameworks.creators import call
from kindler.frameworks.torch import private
from kindler.frameworks.torch.loss import Judged, LossRule
from kindler.frameworks.torch.named_metrics import Counted, Gathered, named
from kindler.frameworks.torch.spec import is_creator, no_metric

_LOOSE_STATES = 256  # before they are joined
_IN_HISTORY = frozenset({"epoch", "steps", "num_samples", "seconds", "rows_per_s"})  # of every epoch


class Counter:
    """Sums by name with what they are divided by: the loss, metrics that are functions, what a step logs.

    `model` has the metrics that the user's own step logs, by path. `rows_seen` and `batches` count what such
    steps saw since tallies were last taken.
    """

    def __init__(
        self, metrics: Mapping[str, Any], device: torch.device, model: torch.nn.Module | None = None
    ) -> None:
        self._states: dict[str, Any] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._gathered: dict[str, Gathered] = {}
        for name, metric in metrics.items():
            if isinstance(metric, Gathered):
                self._gathered[name] = metric
            elif is_metric(metric):
                metric = metric.to(device)
                metric.sync_on_compute = False  # ranks are merged here, not by torch.distributed
                self._states[name] = metric
            else:
                self._functions[name] = metric
        self._device, self._model = device, model
        # On a GPU a recorded step adds to fixed tensors. Numbers that are known without the GPU are not added
        # there, which would be a launch for each.
        self._fixed = device.type == "cuda" and model is None
        self._known: dict[str, float] = {}
        self._seen: dict[str, float] = {}  # of the batch that is being counted
        self._recorded: list[_Recorded] = []  # since `recorded` was called
        self._sums: dict[str, tuple[Any, Any]] = {}
        self._paths: dict[str, str] = {}
        self._newest: set[str] = set()
        self._clear()

    @property
    def has_states(self) -> bool:
        return bool(self._states or self._gathered)

    def add(self, judged: Judged, outputs: Any, targets: tuple[torch.Tensor, ...], rows: int) -> None:
        capturing = self._fixed and torch.cuda.is_current_stream_capturing()
        self._seen = {}
        self._plus("loss", judged.total, judged.weight)
        kept: tuple[Any, Any] | None = None
        with torch.no_grad():
            if self._functions:
                self._measure(_plain(outputs), targets, rows)
            if self.has_states:
                kept = _plain(outputs), targets
                if not capturing:
                    self._keep(*kept)
        if capturing:  # recorded, not computed
            self._recorded.append(_Recorded(self._seen, kept))
        else:
            self._note(rows, self._seen)

    def recorded(self) -> list[_Recorded]:
        """What was recorded in a graph since the last call, to be counted at each replay."""
        recorded, self._recorded = self._recorded, []
        return recorded

    def count(self, rows: int, recorded: Sequence[_Recorded]) -> None:
        """A replay has added the loss and those metrics that are sums; the others are counted here."""
        self._rows += rows
        for part in recorded:
            self._note(0, part.numbers)
            if part.kept is not None:
                with torch.no_grad():  # the next replay writes to the same memory
                    self._keep(*private.tree_map(_copied, part.kept))

    def _note(self, rows: int, numbers: Mapping[str, float]) -> None:
        self._rows += rows
        for name, number in numbers.items():
            self._known[name] = self._known.get(name, 0.0) + number

    def _plus(self, name: str, total: Any, count: Any) -> None:
        sums = self._sums[name]
        self._sums[name] = self._added(name, sums[0], total), self._added(_count(name), sums[1], count)

    def _added(self, key: str, total: Any, more: Any) -> Any:
        if not self._fixed:
            return total + more
        if isinstance(more, torch.Tensor):
            return total.add_(more)
        self._seen[key] = self._seen.get(key, 0.0) + more
        return total

    def _sum(self, name: str) -> tuple[Any, Any]:
        """Copies, with the numbers that were not added."""
        total, count = (part.clone() if isinstance(part, torch.Tensor) else part for part in self._sums[name])
        return total + self._known.get(name, 0.0), count + self._known.get(_count(name), 0.0)

    def begin_batch(self) -> None:
        """Drops the "newest" numbers, those of the previous batch, on all ranks."""
        for name in self._newest:
            self._sums.pop(name, None)

    def note(
        self, values: Mapping[str, Any], rows: int, weight: float | None = None, *, newest: bool = False
    ) -> None:
        """Counts what a step logs; `weight` replaces the rows; `newest` keeps only this batch's."""
        by = float(rows if weight is None else weight)
        for given, value in values.items():
            name = f"{given}_2" if given in _IN_HISTORY else given
            more = value.detach().double() * by if isinstance(value, torch.Tensor) else float(value) * by
            total, count = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = total + more, count + by
            if newest:
                self._newest.add(name)

    def note_metric(self, name: str, path: str) -> None:
        self._paths[name] = path

    def count_rows(self, rows: int) -> None:
        self.rows_seen += rows
        self.batches += 1

    def weight_of(self, name: str) -> float:
        return float(self._sums.get(name, (0.0, 0.0))[1])

    def mark(self) -> Callable[[], None]:
        """The returned function goes back to this point."""
        sums, paths = dict(self._sums), dict(self._paths)

        def go_back() -> None:
            self._sums, self._paths = sums, paths

        return go_back

    def running_metrics(self) -> dict[str, float]:
        """Only means, which are cheap to compute."""
        sums = {name: self._sum(name) for name in self._sums if name != "loss"}
        return {name: self._mean(name, *both) for name, both in sums.items() if float(both[1])}

    def _mean(self, name: str, total: Any, count: Any) -> float:
        if not float(count):
            return math.nan
        mean, function = float(total) / float(count), self._functions.get(name)
        return function.finish(mean) if isinstance(function, Counted) else mean

    def loss_total(self) -> torch.Tensor:
        """Once it is not finite it stays so."""
        total: torch.Tensor = self._sums["loss"][0].clone()
        return total

    def loss_sums(self) -> tuple[float, float]:
        total, weight = self._sum("loss")
        return float(total), float(weight)

    def take(self) -> bytes:
        data = io.BytesIO()
        torch.save(self.keep(), data)
        self._clear()
        return data.getvalue()

    def keep(self) -> dict[str, Any]:
        """Counting goes on."""
        for name, gathered in self._gathered.items():
            self._gathers[name] = gathered.joined(self._gathers[name])
        metrics = {**self._states, **{name: self._metric(path) for name, path in self._paths.items()}}
        return {
            "rows": self._rows,
            "rows_seen": self.rows_seen,
            "batches": self.batches,
            "sums": {name: self._sum(name) for name in self._sums} if self._fixed else dict(self._sums),
            "paths": dict(self._paths),
            "states": {name: states_of(metric) for name, metric in metrics.items()},
            "gathers": {name: _stored(states) for name, states in self._gathers.items()},
        }

    def restore(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Metrics missing from the tallies start anew."""
        self._clear()
        tallies = self._joined([_current(part) for part in parts])
        self._rows, self.rows_seen, self.batches = (tallies[key] for key in ("rows", "rows_seen", "batches"))
        self._paths = dict(tallies["paths"])
        for name, more in tallies["sums"].items():
            if name in self._sums or self._model is not None:
                pairs = zip(self._sums.get(name, (0.0, 0.0)), _moved(list(more), self._device), strict=True)
                total, count = (a.add_(b) if self._fixed else a + b for a, b in pairs)
                self._sums[name] = total, count
        for name in tallies["states"].keys() & (self._states.keys() | self._paths.keys()):
            load_states(self._metric_of(name, self._paths), tallies["states"][name], self._device)
        for name in self._gathered.keys() & tallies["gathers"].keys():
            self._gathers[name] = [tuple(_moved(list(s), self._device)) for s in tallies["gathers"][name]]

    def merge(self, tallies: Sequence[bytes]) -> dict[str, Any]:
        """Curves become lists."""
        files = map(io.BytesIO, tallies)
        parts = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
        return self._figures(self._joined(parts))

    def _joined(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As if one rank had seen all rows."""
        paths = {name: path for part in parts for name, path in part["paths"].items()}
        sums, states, gathers = (_by_name(parts, key) for key in ("sums", "states", "gathers"))
        known = self._states.keys() | paths.keys()
        return {
            "rows": sum(part["rows"] for part in parts),
            "rows_seen": sum(part["rows_seen"] for part in parts),
            "batches": max(part["batches"] for part in parts),
            "sums": {name: tuple(map(sum, zip(*every, strict=True))) for name, every in sums.items()},
            "paths": paths,
            "states": {
                name: joined_states(self._metric_of(name, paths), every)
                for name, every in states.items()
                if name in known
            },
            "gathers": {
                name: [state for states in every for state in states] for name, every in gathers.items()
            },
        }

    def _figures(self, tallies: Mapping[str, Any]) -> dict[str, Any]:
        """Of the user's own steps what they logged, and else the loss and metrics."""
        sums, logged = tallies["sums"], tallies["rows_seen"]
        shown = (
            [name for name in sums if name not in self._functions] if logged else ["loss", *self._functions]
        )
        figures: dict[str, Any] = {name: self._mean(name, *sums[name]) for name in shown}
        for name in () if logged else self._gathered:
            figures[name] = self._gathered[name].computed(tallies["gathers"][name])
        for name in tallies["paths"] if logged else self._states:
            metric = self._metric_of(name, tallies["paths"])
            figures.update(computed(name, metric, tallies["states"][name]))
        figures["num_samples"] = logged or tallies["rows"]
        return figures

    def _metric(self, path: str) -> Any:
        assert self._model is not None, "only steps of the user's own log metrics"
        return self._model.get_submodule(path)

    def _metric_of(self, name: str, paths: Mapping[str, str]) -> Any:
        return self._metric(paths[name]) if name in paths else self._states[name]

    def _clear(self) -> None:
        for metric in (*self._states.values(), *map(self._metric, self._paths.values())):
            metric.reset()
        if self._fixed and self._sums:
            for part in itertools.chain(*self._sums.values()):
                part.zero_()
        else:
            with torch.inference_mode(False):  # training adds to what evaluation may have counted first
                zero = partial(torch.zeros, (), dtype=torch.float64, device=self._device)
                names = ("loss", *self._functions)
                self._sums = {name: (zero(), zero() if self._fixed else 0.0) for name in names}
        self._gathers: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in self._gathered}
        self._known, self._paths = {}, {}
        self._rows = self.rows_seen = self.batches = 0

    def _measure(self, outputs: Any, targets: tuple[torch.Tensor, ...], rows: int) -> None:
        """Metrics that are sums."""
        target = targets[0] if len(targets) == 1 else targets
        for name, function in self._functions.items():
            if isinstance(function, Counted):
                self._plus(name, *function(outputs, target))
                continue
            value = function(outputs, target)
            value = value.detach().double().mean() if isinstance(value, torch.Tensor) else float(value)
            self._plus(name, value * rows, rows)

    def _keep(self, outputs: Any, targets: tuple[torch.Tensor, ...]) -> None:
        """Metrics that keep values or states of their own."""
        target = targets[0] if len(targets) == 1 else targets
        for name, gathered in self._gathered.items():
            states = self._gathers[name]
            states.append(gathered(outputs, target))
            if len(states) > (_LOOSE_STATES if gathered.grows else 1):
                self._gathers[name] = gathered.joined(states)
        for metric in self._states.values():
            metric.update(*_metric_arguments(metric, outputs, targets))


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Of a recorded pass: the numbers that are known without the GPU, and what else metrics are given."""

    numbers: Mapping[str, float]
    kept: tuple[Any, Any] | None


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _count(name: str) -> str:
    return f"{name} count"


def _by_name(parts: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for part in parts for name in part[key])
    return {name: [part[key][name] for part in parts if name in part[key]] for name in names}


def _current(tallies: Mapping[str, Any]) -> Mapping[str, Any]:
    """Checkpoints of earlier versions keep sums of the loss, of metrics and of steps apart."""
    if "sums" in tallies:
        return tallies
    nothing: dict[str, Any] = {"rows": 0, "batches": 0, "sums": {}, "weights": {}, "paths": {}, "states": {}}
    step = tallies.get("step", nothing)
    return {
        "rows": tallies["rows"],
        "rows_seen": step["rows"],
        "batches": step["batches"],
        "sums": {
            "loss": (tallies["loss"], tallies["weight"]),
            **{name: (total, tallies["counts"][name]) for name, total in tallies["means"].items()},
            **{name: (total, step["weights"][name]) for name, total in step["sums"].items()},
        },
        "paths": step["paths"],
        "states": {**tallies["states"], **step["states"]},
        "gathers": tallies.get("gathers", {}),
    }


def named_metrics(given: Any, config: Mapping[str, Any], loss: LossRule | None = None) -> dict[str, Any]:
    """A MetricCollection is split."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and not isinstance(given, torch.nn.Module):
        pairs = [(str(name), metric) for name, metric in given.items()]
    else:
        many = isinstance(given, list | tuple | set)
        pairs = [("", metric) for metric in (given if many else [given])]
    named: dict[str, Any] = {}
    for name, metric in pairs:
        for label, made in _made(name, metric, config, loss):
            named[_free(label, named)] = made
    return named


def _made(
    name: str, given: Any, config: Mapping[str, Any], loss: LossRule | None
) -> Iterator[tuple[str, Any]]:
    if isinstance(given, str):
        yield name or given, named(given, loss)
        return
    metric = call(given, config) if is_creator(given) else given
    if isinstance(metric, torch.nn.ModuleDict):  # a MetricCollection
        yield from ((f"{name}_{key}" if name else key, part) for key, part in metric.items())
    elif callable(metric):
        yield name or getattr(metric, "__name__", type(metric).__name__), metric
    else:
        raise ConfigError(no_metric(metric))


def _free(name: str, taken: Mapping[str, Any]) -> str:
    number, label = 1, name
    while label in taken or label in ("loss", "num_samples"):
        number += 1
        label = f"{name}_{number}"
    return label


def is_metric(metric: Any) -> bool:
    library = sys.modules.get("torchmetrics")  # not loaded: then it is none of theirs
    return library is not None and isinstance(metric, library.Metric)


def _plain(outputs: Any) -> Any:
    """Widens half precision, which few metrics take."""
    if isinstance(outputs, torch.Tensor):
        outputs = outputs.detach()
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    if isinstance(outputs, tuple | list):
        return tuple(_plain(output) for output in outputs)
    if isinstance(outputs, Mapping):
        return {name: _plain(output) for name, output in outputs.items()}
    return outputs


def _metric_arguments(metric: Any, outputs: Any, targets: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
    output = outputs[0] if isinstance(outputs, tuple) else outputs
    target = targets[0]
    if not isinstance(output, torch.Tensor):
        return output, target
    if target.shape != output.shape and target.numel() == output.numel():
        if output.dim() > target.dim():
            output = output.reshape(target.shape)
        else:
            target = target.reshape(output.shape)
    elif target.dim() == output.dim() > 1 and target.shape[1] == 1:
        target = target.squeeze(1)
    if target.is_floating_point() and type(metric).__module__.startswith("torchmetrics.classification"):
        target = _whole(target, metric)
    return output, target


def _whole(target: torch.Tensor, metric: Any) -> torch.Tensor:
    cut = target.to(torch.int64)
    if bool((cut != target).any()):
        raise DataError(
            f"the metric {type(metric).__name__} needs class numbers, and there are labels that are not whole"
            f" numbers, as {float(target[cut != target][0])}.\n"
            "Hint: a function (outputs, targets) can measure labels of any form."
        )
    return cut


def _parts(metric: Any) -> Iterator[tuple[str, Any]]:
    return ((path, part) for path, part in metric.named_modules() if is_metric(part))


def states_of(metric: Any, stored: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    stored = stored or _stored
    return {
        path: {
            "updates": int(part._update_count),
            "state": {name: stored(getattr(part, name)) for name in part._reductions},
        }
        for path, part in _parts(metric)
    }


def undo_metric(metric: Any) -> Callable[[], None]:
    # Lists only grow: what is in them stays as it is.
    states = states_of(metric, lambda s: list(s) if isinstance(s, list) else s.detach().clone())
    return lambda: load_states(metric, states, metric.device)


def _stored(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().clone()
    return type(state)(_stored(part) for part in state)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_moved(part, device) for part in value] if isinstance(value, list) else value


def joined_states(metric: Any, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result can go on counting, as if one rank had seen all rows."""
    joined: dict[str, Any] = {}
    for path, part in _parts(metric):
        # A rank without rows holds initial values; a mean or a stack must not count them.
        seen = [rank[path] for rank in ranks if rank[path]["updates"]] or [ranks[0][path]]
        state: dict[str, Any] = {}
        for name, reduce in part._reductions.items():
            values = [rank["state"][name] for rank in seen]
            if not isinstance(values[0], torch.Tensor):
                state[name] = [one for value in values for one in value]
            elif len(values) == 1:
                state[name] = values[0]
            else:
                state[name] = torch.stack(values) if reduce is None else reduce(torch.stack(values))
        joined[path] = {"updates": sum(rank["updates"] for rank in seen), "state": state}
    return joined


def load_states(metric: Any, states: Mapping[str, Any], device: torch.device) -> None:
    for path, part in _parts(metric):
        for state, value in states[path]["state"].items():
            setattr(part, state, _moved(value, device))
        part._update_count = states[path]["updates"]
        part._computed = None


def computed(name: str, template: Any, states: Mapping[str, Any]) -> dict[str, Any]:
    """NaN if no rank saw a row."""
    metric = copy.deepcopy(template).to("cpu")
    metric.reset()
    load_states(metric, states, torch.device("cpu"))
    seen = any(part["updates"] for part in states.values())
    return dict(_numbers(name, metric.compute() if seen else math.nan))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A number, one per class or key, or a curve or matrix as lists."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(f"{name}_{key}", part)
    elif isinstance(value, tuple | list) or (isinstance(value, torch.Tensor) and value.dim() > 1):
        yield name, _lists(value)
    elif isinstance(value, torch.Tensor) and value.numel() != 1:
        yield from ((f"{name}_{place}", part) for place, part in enumerate(value.tolist()))
    else:
        yield name, float(value)


def _lists(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_lists(part) for part in value] if isinstance(value, tuple | list) else float(value)
