"""A whole training step as one CUDA graph: forward, loss, backward, clipping and optimizer in a single launch.

Small models spend most of a step launching kernels one by one from Python. A graph records the kernels of one
step and replays them on other rows, which are copied to where the recorded ones lay. What Python decides in a
step (shapes, learning rates, which parameters are trained) is recorded too, so a graph is thrown away when one
of these changes, and steps of another shape run one kernel at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from kindler.errors import ConfigError

__all__ = ["GraphedStep", "facts_of", "make_capturable", "why_not"]

_WARM_UP_STEPS = 3  # libraries choose their kernels, and optimizers make their state
_MOST_CAPTURES = 20
_SCALARS = (int, float, bool, str, tuple, type(None))

Tensors = tuple[torch.Tensor, ...]


class GraphedStep:
    """Runs steps as a graph where it can.

    Args:
        compute: Computes a whole step on these features and labels, and moves the weights.
        facts: All that Python decides in a step, other than shapes; a graph is good while they are the same.
    """

    def __init__(self, compute: Callable[[Tensors, Tensors], None], facts: Callable[[], Hashable]) -> None:
        self._compute, self._facts = compute, facts
        self._graph: torch.cuda.CUDAGraph | None = None
        self._features: Tensors = ()
        self._labels: Tensors = ()
        self._known: Hashable = None
        self._shapes: Hashable = None
        self._steps = self._captures = 0

    def run(self, features: Tensors, labels: Tensors) -> bool:
        """One step; whether a graph ran alone, without `compute`."""
        shapes = _shapes(features, labels)
        if self._shapes is None:
            self._shapes = shapes  # of the first step; only the last of an epoch has others
        if shapes != self._shapes or self._steps < _WARM_UP_STEPS or self._captures >= _MOST_CAPTURES:
            self._steps += shapes == self._shapes
            self._alone(features, labels)
            return False
        facts = self._facts()
        if self._graph is None or facts != self._known:
            self._capture(features, labels).replay()
            self._known = facts
            return False
        for place, rows in zip((*self._features, *self._labels), (*features, *labels), strict=True):
            place.copy_(rows, non_blocking=True)
        self._graph.replay()
        return True

    def _alone(self, features: Tensors, labels: Tensors) -> None:
        """One step kernel by kernel, on a stream of its own as a recording needs it."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._compute(features, labels)
        current.wait_stream(side)

    def _capture(self, features: Tensors, labels: Tensors) -> torch.cuda.CUDAGraph:
        self._graph = None
        self._features, self._labels = (tuple(t.clone() for t in part) for part in (features, labels))
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (those that make batches) may go on meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._compute(self._features, self._labels)
        except RuntimeError as exc:
            raise ConfigError(
                f"a step of this model cannot be recorded as a CUDA graph: {str(exc).partition(chr(10))[0]}\n"
                "Hint: something in the model, its loss or its metrics reads a value back from the GPU (.item(),"
                " an if on a tensor, indexing with a mask). Use compile='default', or leave compile out."
            ) from exc
        self._graph = graph
        self._captures += 1
        return graph


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer keep all of its state on the GPU."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True


def why_not(
    spec: Any, optimizer: torch.optim.Optimizer, device: torch.device, *, several: bool
) -> str | None:
    """Why steps cannot be graphs, as far as that is known before one is tried."""
    kind = type(optimizer)
    known = all("capturable" in group for group in optimizer.param_groups) or kind is torch.optim.SGD
    reasons = {
        f"the device is {device.type}": device.type != "cuda",
        "gradients are exchanged with other workers": several,
        f"accumulation_steps is {spec.accumulation_steps}": spec.accumulation_steps > 1,
        "the learning rate changes with every step": (
            spec.scheduler_creator is not None and spec.scheduler_step == "step"
        ),
        f"{kind.__module__}.{kind.__name__} has no option `capturable`": not known,
        "metrics of torchmetrics read values back": _has_torchmetrics(spec.metrics),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def facts_of(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> Hashable:
    """What a recorded step depends on: where weights lie, which are trained, and the optimizer's numbers."""
    weights = tuple((p.data_ptr(), p.requires_grad) for p in parameters)
    numbers = tuple(
        tuple((key, value) for key, value in group.items() if isinstance(value, _SCALARS))
        for group in optimizer.param_groups
    )
    return weights, numbers


def _shapes(features: Tensors, labels: Tensors) -> Hashable:
    return tuple((tensor.shape, tensor.dtype) for tensor in (*features, *labels)), len(features)


def _has_torchmetrics(metrics: Any) -> bool:
    several = metrics.values() if isinstance(metrics, dict) else metrics
    parts = (
        list(several) if isinstance(several, list | tuple | set) or isinstance(metrics, dict) else [metrics]
    )
    return any(type(part).__module__.partition(".")[0] == "torchmetrics" for part in parts)
