"""A whole training step as one CUDA graph: small models spend most of a step launching kernels.

What Python decides (shapes, learning rates, which parameters are trained) is recorded, too: if it changes,
the graph is thrown away, and steps of other shapes run without one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch

_WARM_UP_STEPS = 3  # libraries choose their kernels, and optimizers make their state
_MOST_CAPTURES = 20
_SCALARS = (int, float, bool, str, type(None))
_OF_ALL = frozenset(vars(torch.nn.Module()))  # what every module has

Tensors = tuple[torch.Tensor, ...]


class GraphedStep:
    """`problem` says why there is no graph, once tried."""

    problem: str | None = None

    def __init__(
        self,
        compute: Callable[[Tensors, Tensors], None],
        facts: Callable[[], Hashable],
        in_python: Callable[[], Any],
    ) -> None:
        self._compute, self._facts, self._in_python = compute, facts, in_python
        self._graph: torch.cuda.CUDAGraph | None = None
        self._features: Tensors = ()
        self._labels: Tensors = ()
        self._known: Hashable = None
        self._shapes: Hashable = None
        self._steps = self._captures = 0

    def run(self, features: Tensors, labels: Tensors) -> bool:
        shapes = _shapes(features, labels)
        if self._shapes is None:
            self._shapes = shapes  # of the first step; only the last of an epoch has others
        usual = shapes == self._shapes
        if usual and self._steps < _WARM_UP_STEPS:
            self._warm_up(features, labels)
            return False
        if not usual or self.problem is not None or self._captures >= _MOST_CAPTURES:
            self._alone(features, labels)
            return False
        facts = self._facts()
        if self._graph is None or facts != self._known:
            self._known = facts
            graph = self._captured(features, labels)
            if graph is None:
                self._alone(features, labels)
                return False
            graph.replay()
            return True
        for place, rows in zip((*self._features, *self._labels), (*features, *labels), strict=True):
            place.copy_(rows, non_blocking=True)
        self._graph.replay()
        return True

    def _warm_up(self, features: Tensors, labels: Tensors) -> None:
        before = self._in_python()
        self._alone(features, labels)
        self._steps += 1
        if self._in_python() != before:
            self.problem = "the model draws random numbers in Python, or changes its own numbers in each step"

    def _alone(self, features: Tensors, labels: Tensors) -> None:
        """On a side stream, as recording needs it."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._compute(features, labels)
        current.wait_stream(side)

    def _captured(self, features: Tensors, labels: Tensors) -> torch.cuda.CUDAGraph | None:
        """Does not run the step; None if it cannot be recorded."""
        self._graph = None
        self._features, self._labels = (tuple(t.clone() for t in part) for part in (features, labels))
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        drawn = generator.clone_state()
        try:
            # Other threads (those that make batches) may go on meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._compute(self._features, self._labels)
        except RuntimeError as exc:
            generator.graphsafe_set_state(drawn)  # it would go on as if it were recorded
            self.problem = (
                "something in the model, its loss or its metrics reads a value back from the GPU (.item(), an"
                f" if on a tensor, indexing with a mask): {str(exc).partition(chr(10))[0]}"
            )
            return None
        self._graph = graph
        self._captures += 1
        return graph


def set_capturable(optimizer: torch.optim.Optimizer, device: torch.device, *, wanted: bool) -> None:
    """A loaded state brings the option along from where it was saved."""
    for group in optimizer.param_groups:
        if "capturable" in group and (wanted or device.type == "cpu"):
            group["capturable"] = device.type == "cuda"


def why_not(
    spec: Any,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    several: bool,
    stateful_metrics: bool,
    skips: bool = False,
) -> str | None:
    kind = type(optimizer)
    known = all("capturable" in group for group in optimizer.param_groups) or kind is torch.optim.SGD
    reasons = {
        f"the device is {device.type}": device.type != "cuda",
        "gradients are exchanged with other workers": several,
        "losses are scaled for precision='fp16'": spec.precision == "fp16",
        "the model computes its own loss": isinstance(spec.loss, str),
        "there are several losses": isinstance(spec.loss, list | tuple | dict),
        f"accumulation_steps is {spec.accumulation_steps}": spec.accumulation_steps > 1,
        "the learning rate changes in every step": (
            spec.scheduler is not None and spec.scheduler_step == "step"
        ),
        f"{kind.__module__}.{kind.__name__} has no option `capturable`": not known,
        "metrics of torchmetrics keep their state in Python": stateful_metrics,
        "nan_loss='skip' decides in Python whether a step counts": skips,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def facts_of(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> Hashable:
    weights = tuple((p.data_ptr(), p.requires_grad) for p in parameters)
    numbers = tuple(
        tuple((key, value) for key, value in group.items() if _is_plain(value))
        for group in optimizer.param_groups
    )
    return weights, numbers


def numbers_in_python(*modules: torch.nn.Module) -> Any:
    kept = [
        {name: repr(value) for name, value in vars(part).items() if name not in _OF_ALL and _is_plain(value)}
        for module in modules
        for part in module.modules()
    ]
    drawn: Any = np.random.get_state()
    return kept, random.getstate(), drawn[1].tobytes(), drawn[2], torch.get_rng_state().numpy().tobytes()


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _SCALARS)


def _shapes(features: Tensors, labels: Tensors) -> Hashable:
    return tuple((tensor.shape, tensor.dtype) for tensor in (*features, *labels)), len(features)
