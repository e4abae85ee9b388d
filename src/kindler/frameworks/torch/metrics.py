"""Tallies of loss, rows and metrics that merge exactly over ranks; reading them executes nothing.

torchmetrics metrics merge by states and reductions, plain functions are averaged by rows, and those with a
name (`named_metrics.py`) report how many values they counted, or keep a state.
"""

from __future__ import annotations

import copy
import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kindler.errors import ConfigError, DataError
from kindler.frameworks.creators import call
from kindler.frameworks.torch.loss import Judged, LossRule
from kindler.frameworks.torch.named_metrics import Counted, Gathered, named
from kindler.frameworks.torch.spec import is_creator, no_metric

_WEIGHT = "weight of the loss"
_LOOSE_STATES = 256  # before they are joined
_IN_HISTORY = frozenset({"epoch", "steps", "num_samples", "seconds", "rows_per_s"})  # of every epoch


class Counter:
    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
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
        self._device = device
        self._rows = 0
        # Numbers that are known without the GPU are not added there, which would be a launch for each.
        self._known: dict[str, float] = {}
        self._seen: dict[str, float] = {}  # of the batch that is being counted
        self._recorded: dict[str, float] = {}  # of each step that a graph replays
        with torch.inference_mode(False):  # training adds to what evaluation may have counted first
            self._loss = torch.zeros((), dtype=torch.float64, device=device)
            self._weight: float | torch.Tensor = self._zero()
            self._means: dict[str, Any] = {name: self._zero() for name in self._functions}
            self._counts: dict[str, Any] = {name: self._zero() for name in self._functions}
        self._gathers: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in self._gathered}
        for metric in self._states.values():
            metric.reset()

    @property
    def has_states(self) -> bool:
        return bool(self._states or self._gathered)

    def _zero(self) -> float | torch.Tensor:
        """On a GPU a sum needs a fixed tensor, which a recorded step adds to."""
        return torch.zeros_like(self._loss) if self._loss.is_cuda else 0.0

    def add(self, judged: Judged, outputs: Any, targets: tuple[torch.Tensor, ...], rows: int) -> None:
        capturing = self._loss.is_cuda and torch.cuda.is_current_stream_capturing()
        self._seen = {}
        self._loss += judged.total
        self._weight = self._plus(_WEIGHT, self._weight, judged.weight)
        if self._states or self._functions or self._gathered:
            with torch.no_grad():
                self._measure(outputs, targets, rows)
        if capturing:  # recorded, not computed
            self._recorded = self._seen
        else:
            self._note(rows, self._seen)

    def count(self, rows: int) -> None:
        """A recorded step has added their loss and metrics."""
        self._note(rows, self._recorded)

    def _note(self, rows: int, numbers: Mapping[str, float]) -> None:
        self._rows += rows
        for name, number in numbers.items():
            self._known[name] = self._known.get(name, 0.0) + number

    def _plus(self, name: str, total: Any, more: Any) -> Any:
        """On a GPU, adds tensors in place and defers plain numbers."""
        if not self._loss.is_cuda or isinstance(more, torch.Tensor):
            return _plus(total, more)
        self._seen[name] = self._seen.get(name, 0.0) + more
        return total

    def _all(self, name: str, total: Any) -> Any:
        """A copy, with the numbers that were not added."""
        return (total.clone() if isinstance(total, torch.Tensor) else total) + self._known.get(name, 0.0)

    def running_loss(self) -> float:
        loss, weight = self.loss_sums()
        return loss / weight if weight else math.nan

    def running_metrics(self) -> dict[str, float]:
        """Only means of functions, which are cheap to compute."""
        counts = {name: float(self._all(_count(name), count)) for name, count in self._counts.items()}
        means = {name: float(self._all(name, total)) for name, total in self._means.items()}
        return {name: self._finished(name, means[name] / count) for name, count in counts.items() if count}

    def _finished(self, name: str, mean: float) -> float:
        function = self._functions[name]
        return function.finish(mean) if isinstance(function, Counted) else mean

    def loss_total(self) -> torch.Tensor:
        """Once it is not finite it stays so."""
        return self._loss.clone()

    def loss_sums(self) -> tuple[float, float]:
        return float(self._loss), float(self._all(_WEIGHT, self._weight))

    def take(self) -> bytes:
        data = io.BytesIO()
        torch.save(self.keep(), data)
        self._clear()
        return data.getvalue()

    def keep(self) -> dict[str, Any]:
        """Counting goes on."""
        for name, gathered in self._gathered.items():
            self._gathers[name] = gathered.joined(self._gathers[name])
        return {
            "loss": self._loss.clone(),
            "weight": self._all(_WEIGHT, self._weight),
            "rows": self._rows,
            "means": {name: self._all(name, total) for name, total in self._means.items()},
            "counts": {name: self._all(_count(name), count) for name, count in self._counts.items()},
            "states": {name: states_of(metric) for name, metric in self._states.items()},
            "gathers": {name: _stored(states) for name, states in self._gathers.items()},
        }

    def restore(self, tallies: Mapping[str, Any]) -> None:
        """Metrics missing from the tallies start anew."""
        self._clear()
        self._loss += tallies["loss"].to(self._device)
        self._weight = _plus(self._weight, _moved(tallies["weight"], self._device))
        self._rows = tallies["rows"]
        for name in self._means.keys() & tallies["means"].keys():
            for kept, key in ((self._means, "means"), (self._counts, "counts")):
                kept[name] = _plus(kept[name], _moved(tallies[key][name], self._device))
        for name in self._states.keys() & tallies["states"].keys():
            load_states(self._states[name], tallies["states"][name], self._device)
        for name in self._gathered.keys() & tallies.get("gathers", {}).keys():
            self._gathers[name] = [tuple(_moved(list(s), self._device)) for s in tallies["gathers"][name]]

    def restore_all(self, parts: Sequence[Mapping[str, Any]]) -> None:
        self.restore(self._joined(parts))

    def merge(self, tallies: Sequence[bytes]) -> dict[str, Any]:
        """Curves become lists."""
        files = map(io.BytesIO, tallies)
        parts = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
        return self._figures(self._joined(parts))

    def _joined(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As if one rank had seen all rows."""
        first = parts[0]
        gathers = first.get("gathers", {})
        return {
            **{key: sum(part[key] for part in parts) for key in ("loss", "weight", "rows")},
            "means": {name: sum(part["means"][name] for part in parts) for name in first["means"]},
            "counts": {name: sum(part["counts"][name] for part in parts) for name in first["counts"]},
            "states": {
                name: joined_states(self._states[name], [part["states"][name] for part in parts])
                for name in first["states"].keys() & self._states.keys()
            },
            "gathers": {name: [s for part in parts for s in part["gathers"][name]] for name in gathers},
        }

    def _figures(self, tallies: Mapping[str, Any]) -> dict[str, Any]:
        weight = float(tallies["weight"])
        figures: dict[str, Any] = {"loss": float(tallies["loss"]) / weight if weight else math.nan}
        for name in self._functions:
            total, count = float(tallies["means"][name]), float(tallies["counts"][name])
            figures[name] = self._finished(name, total / count) if count else math.nan
        for name, gathered in self._gathered.items():
            figures[name] = gathered.computed(tallies["gathers"][name])
        for name, metric in self._states.items():
            figures.update(computed(name, metric, tallies["states"][name]))
        figures["num_samples"] = tallies["rows"]
        return figures

    def _clear(self) -> None:
        self._loss.zero_()
        self._weight = _nothing(self._weight)
        self._rows = 0
        self._known = {}
        for name in self._functions:
            self._means[name], self._counts[name] = _nothing(self._means[name]), _nothing(self._counts[name])
        self._gathers = {name: [] for name in self._gathered}
        for metric in self._states.values():
            metric.reset()

    def _measure(self, outputs: Any, targets: tuple[torch.Tensor, ...], rows: int) -> None:
        outputs = _plain(outputs)
        target = targets[0] if len(targets) == 1 else targets
        for name, function in self._functions.items():
            total: Any
            count: Any
            if isinstance(function, Counted):
                total, count = function(outputs, target)
            else:
                value = function(outputs, target)
                value = value.detach().double().mean() if isinstance(value, torch.Tensor) else float(value)
                total, count = value * rows, rows
            self._means[name] = self._plus(name, self._means[name], total)
            self._counts[name] = self._plus(_count(name), self._counts[name], count)
        for name, gathered in self._gathered.items():
            states = self._gathers[name]
            states.append(gathered(outputs, target))
            if len(states) > (_LOOSE_STATES if gathered.grows else 1):
                self._gathers[name] = gathered.joined(states)
        for metric in self._states.values():
            metric.update(*_metric_arguments(metric, outputs, targets))


def _count(name: str) -> str:
    return f"{name} count"


def _plus(total: Any, more: Any) -> Any:
    return total.add_(more) if isinstance(total, torch.Tensor) and total.is_cuda else total + more


def _nothing(total: Any) -> Any:
    return total.zero_() if isinstance(total, torch.Tensor) and total.is_cuda else 0.0


class StepCounter(Counter):
    """Also counts what the user's own step logs: means over rows, and metrics of the model's, by path.

    `rows_seen` and `batches` count since tallies were last taken.
    """

    def __init__(self, metrics: Mapping[str, Any], device: torch.device, model: torch.nn.Module) -> None:
        self._sums: dict[str, float | torch.Tensor] = {}
        self._weights: dict[str, float] = {}
        self._paths: dict[str, str] = {}
        self._newest: set[str] = set()
        self._metric_at: Callable[[str], Any] = model.get_submodule
        self.rows_seen = self.batches = 0
        super().__init__(metrics, device)

    def begin_batch(self) -> None:
        """Drops the "newest" numbers, those of the previous batch, on all ranks."""
        for name in self._newest:
            self._sums.pop(name, None)
            self._weights.pop(name, None)

    def note(
        self, values: Mapping[str, Any], rows: int, weight: float | None = None, *, newest: bool = False
    ) -> None:
        """`weight` replaces the rows; `newest` keeps only this batch's."""
        by = float(rows if weight is None else weight)
        for given, value in values.items():
            name = f"{given}_2" if given in _IN_HISTORY else given
            more = value.detach().double() * by if isinstance(value, torch.Tensor) else float(value) * by
            self._sums[name] = self._sums.get(name, 0.0) + more
            self._weights[name] = self._weights.get(name, 0.0) + by
            if newest:
                self._newest.add(name)

    def mark(self) -> Callable[[], None]:
        """The returned function goes back to this point."""
        sums, weights, paths = dict(self._sums), dict(self._weights), dict(self._paths)

        def go_back() -> None:
            self._sums, self._weights, self._paths = sums, weights, paths

        return go_back

    def count_rows(self, rows: int) -> None:
        self.rows_seen += rows
        self.batches += 1

    def weight_of(self, name: str) -> float:
        return self._weights.get(name, 0.0)

    def note_metric(self, name: str, path: str) -> None:
        self._paths[name] = path

    def loss_sums(self) -> tuple[float, float]:
        if "loss" not in self._sums:
            return super().loss_sums()
        return float(self._sums["loss"]), self._weights["loss"]

    def running_metrics(self) -> dict[str, float]:
        noted = {name: (float(total), self._weights[name]) for name, total in self._sums.items()}
        own = {name: total / by for name, (total, by) in noted.items() if name != "loss" and by}
        return super().running_metrics() | own

    def keep(self) -> dict[str, Any]:
        step = {
            "rows": self.rows_seen,
            "batches": self.batches,
            "sums": {name: float(total) for name, total in self._sums.items()},
            "weights": dict(self._weights),
            "paths": dict(self._paths),
            "states": {name: states_of(self._metric_at(path)) for name, path in self._paths.items()},
        }
        return {**super().keep(), "step": step}

    def restore(self, tallies: Mapping[str, Any]) -> None:
        super().restore(tallies)
        step = tallies["step"]
        self.rows_seen, self.batches = step["rows"], step["batches"]
        self._sums, self._weights, self._paths = (dict(step[key]) for key in ("sums", "weights", "paths"))
        for name, path in self._paths.items():
            load_states(self._metric_at(path), step["states"][name], self._device)

    def _joined(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        steps = [part["step"] for part in parts]
        paths = {name: path for step in steps for name, path in step["paths"].items()}
        states = {name: [step["states"][name] for step in steps if name in step["states"]] for name in paths}
        step = {
            "rows": sum(step["rows"] for step in steps),
            "batches": max(step["batches"] for step in steps),
            "sums": _added(step["sums"] for step in steps),
            "weights": _added(step["weights"] for step in steps),
            "paths": paths,
            "states": {
                name: joined_states(self._metric_at(paths[name]), own) for name, own in states.items()
            },
        }
        return {**super()._joined(parts), "step": step}

    def _figures(self, tallies: Mapping[str, Any]) -> dict[str, Any]:
        step = tallies["step"]
        if not step["rows"]:
            return super()._figures(tallies)
        figures: dict[str, Any] = {"loss": math.nan}
        for name, total in step["sums"].items():
            figures[name] = total / step["weights"][name] if step["weights"][name] else math.nan
        for name, path in step["paths"].items():
            figures |= computed(name, self._metric_at(path), step["states"][name])
        return {**figures, "num_samples": step["rows"]}

    def _clear(self) -> None:
        super()._clear()
        for path in self._paths.values():
            self._metric_at(path).reset()
        self._sums, self._weights, self._paths = {}, {}, {}
        self.rows_seen = self.batches = 0


def _added(parts: Iterator[Mapping[str, float]]) -> dict[str, float]:
    added: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            added[name] = added.get(name, 0.0) + float(value)
    return added


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


def states_of(metric: Any) -> dict[str, Any]:
    return {
        path: {
            "updates": int(part._update_count),
            "state": {name: _stored(getattr(part, name)) for name in part._reductions},
        }
        for path, part in _parts(metric)
    }


def _stored(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().clone()
    return type(state)(_stored(part) for part in state)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_moved(part, device) for part in value] if isinstance(value, list) else value


def state_of(metric: Any) -> Any:
    # Lists only grow: what is in them stays as it is.
    states = ((name, getattr(metric, name)) for name in metric._reductions)
    copies = {name: list(s) if isinstance(s, list) else s.detach().clone() for name, s in states}
    return metric._update_count, copies


def put_back_state(metric: Any, state: Any) -> None:
    metric._update_count, copies = state
    metric._computed = None
    for name, value in copies.items():
        setattr(metric, name, value)


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
