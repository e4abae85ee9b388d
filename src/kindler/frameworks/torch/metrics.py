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

_FORMAT = 2
_WEIGHT = "weight of the loss"
_LOOSE_STATES = 256  # before they are joined


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

    def _total(self, name: str, total: Any) -> float:
        return float(total) + self._known.get(name, 0.0)

    def running_loss(self) -> float:
        loss, weight = self.loss_sums()
        return loss / weight if weight else math.nan

    def running_metrics(self) -> dict[str, float]:
        """Only means of functions, which are cheap to compute."""
        counts = {name: self._total(_count(name), count) for name, count in self._counts.items()}
        means = {name: self._total(name, total) for name, total in self._means.items()}
        return {name: self._finished(name, means[name] / count) for name, count in counts.items() if count}

    def _finished(self, name: str, mean: float) -> float:
        function = self._functions[name]
        return function.finish(mean) if isinstance(function, Counted) else mean

    def loss_total(self) -> torch.Tensor:
        """Once it is not finite it stays so."""
        return self._loss.clone()

    def loss_sums(self) -> tuple[float, float]:
        return float(self._loss), self._total(_WEIGHT, self._weight)

    def take(self) -> bytes:
        loss, weight = self.loss_sums()
        sums = {
            "means": {name: self._total(name, total) for name, total in self._means.items()},
            "counts": {name: self._total(_count(name), count) for name, count in self._counts.items()},
        }
        tallies = {"format": _FORMAT, **self.keep(), "loss": loss, "weight": weight, **sums}
        self._clear()
        data = io.BytesIO()
        torch.save(tallies, data)
        return data.getvalue()

    def keep(self) -> dict[str, Any]:
        """Counting goes on."""
        return {
            "loss": self._loss.clone(),
            "weight": _copied(self._weight) + self._known.get(_WEIGHT, 0.0),
            "rows": self._rows,
            "means": {
                name: _copied(total) + self._known.get(name, 0.0) for name, total in self._means.items()
            },
            "counts": {
                name: _copied(count) + self._known.get(_count(name), 0.0)
                for name, count in self._counts.items()
            },
            "states": {name: states_of(metric) for name, metric in self._states.items()},
            "gathers": {name: self._joined(name) for name in self._gathered},
        }

    def _joined(self, name: str) -> list[tuple[torch.Tensor, ...]]:
        """Joins them to at most one state, on the CPU."""
        self._gathers[name] = self._gathered[name].joined(self._gathers[name])
        return [tuple(part.cpu() for part in state) for state in self._gathers[name]]

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
            load_states(self._states[name], [tallies["states"][name]], self._device)
        for name, states in tallies.get("gathers", {}).items():
            if name in self._gathered:
                self._gathers[name] = [tuple(part.to(self._device) for part in state) for state in states]

    def restore_all(self, parts: Sequence[Mapping[str, Any]]) -> None:
        means, states = parts[0]["means"].keys(), parts[0]["states"].keys()
        self.restore(
            {
                "loss": sum(part["loss"].cpu() for part in parts),
                "weight": sum(_moved(part["weight"], torch.device("cpu")) for part in parts),
                "rows": sum(part["rows"] for part in parts),
                "means": {name: sum(part["means"][name] for part in parts) for name in means},
                "counts": {name: sum(part["counts"][name] for part in parts) for name in means},
                "states": {
                    name: _joined_states(self._states[name], [part["states"][name] for part in parts])
                    for name in states & self._states.keys()
                },
                "gathers": {
                    name: [state for part in parts for state in part["gathers"][name]]
                    for name in parts[0].get("gathers", {})
                },
            }
        )

    def merge(self, tallies: Sequence[bytes]) -> dict[str, Any]:
        """Curves become lists."""
        parts = [torch.load(io.BytesIO(data), map_location="cpu", weights_only=True) for data in tallies]
        rows = sum(part["rows"] for part in parts)
        weight = sum(part["weight"] for part in parts)
        merged: dict[str, Any] = {
            "loss": sum(part["loss"] for part in parts) / weight if weight else math.nan
        }
        for name in self._functions:
            total, count = (sum(part[kind][name] for part in parts) for kind in ("means", "counts"))
            merged[name] = self._finished(name, total / count) if count else math.nan
        for name, gathered in self._gathered.items():
            merged[name] = gathered.computed([state for part in parts for state in part["gathers"][name]])
        for name, metric in self._states.items():
            merged.update(_numbers(name, _computed(metric, [part["states"][name] for part in parts])))
        merged["num_samples"] = rows
        return merged

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


def _copied(total: Any) -> Any:
    return total.clone() if isinstance(total, torch.Tensor) else total


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
    return [_stored(part) for part in state]


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_moved(part, device) for part in value] if isinstance(value, list) else value


def _computed(template: Any, ranks: Sequence[Mapping[str, Any]]) -> Any:
    """NaN if no rank saw a row."""
    metric = copy.deepcopy(template).to("cpu")
    metric.reset()
    updated = False
    for path, part in _parts(metric):
        seen = [rank[path] for rank in ranks if rank[path]["updates"]]
        # A rank without rows holds initial values; a mean or a stack must not count them.
        for name, reduce in part._reductions.items():
            if seen:
                setattr(part, name, _reduced([rank["state"][name] for rank in seen], reduce))
        part._update_count = sum(rank["updates"] for rank in seen)
        part._computed = None
        updated = updated or bool(seen)
    return metric.compute() if updated else math.nan


def _joined_states(metric: Any, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result can go on counting, as if one rank had seen all rows."""
    joined: dict[str, Any] = {}
    for path, part in _parts(metric):
        seen = [rank[path] for rank in ranks if rank[path]["updates"]] or [ranks[0][path]]
        state = {}
        for name, reduce in part._reductions.items():
            values = [rank["state"][name] for rank in seen]
            lists = not isinstance(values[0], torch.Tensor)
            state[name] = [one for value in values for one in value] if lists else _reduced(values, reduce)
        joined[path] = {"updates": sum(rank["updates"] for rank in seen), "state": state}
    return joined


def _reduced(states: Sequence[Any], reduce: Callable[[Any], Any] | None) -> Any:
    if isinstance(states[0], torch.Tensor):
        if len(states) == 1:
            return states[0]
        joined: Any = torch.stack(list(states))
    else:
        joined = [part for state in states for part in state]
        if not joined:
            return joined
    return joined if reduce is None else reduce(joined)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A number, one per class or key, or a curve or matrix as lists."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(f"{name}_{key}", part)
    elif isinstance(value, tuple | list):  # the coordinates of a curve
        yield name, _lists(value)
    elif isinstance(value, torch.Tensor) and value.dim() > 1:
        yield name, value.tolist()
    elif isinstance(value, torch.Tensor) and value.numel() != 1:
        yield from ((f"{name}_{place}", part) for place, part in enumerate(value.tolist()))
    else:
        yield name, float(value)


def _lists(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_lists(part) for part in value] if isinstance(value, tuple | list) else float(value)


def load_states(metric: Any, ranks: Sequence[Mapping[str, Any]], device: torch.device) -> None:
    states = ranks[0] if len(ranks) == 1 else _joined_states(metric, ranks)
    for path, part in _parts(metric):
        for state, value in states[path]["state"].items():
            setattr(part, state, _moved(value, device))
        part._update_count = states[path]["updates"]
        part._computed = None


def computed_over(name: str, metric: Any, ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return dict(_numbers(name, _computed(metric, ranks)))
