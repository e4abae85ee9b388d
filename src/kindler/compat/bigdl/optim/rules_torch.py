"""BigDL's optimizers as optimizers of torch: the same formulas as in graphs, see `methods.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from kindler.compat.bigdl.nn.base import regularized
from kindler.compat.bigdl.nn.regularizers import Regularizer
from kindler.compat.bigdl.optim.methods import LBFGS, OptimMethod
from kindler.errors import ConfigError

__all__ = ["RuleOptimizer", "TorchRule"]


class _Math:
    @staticmethod
    def divide_no_nan(first: Any, second: Any) -> Any:
        return torch.where(second == 0, torch.zeros_like(first), first / second)


class _Operations:
    """The operations of the formulas, under TensorFlow's names."""

    float64 = torch.float64
    where, sqrt, abs, sign = torch.where, torch.sqrt, torch.abs, torch.sign
    maximum, ones_like, zeros_like = torch.maximum, torch.ones_like, torch.zeros_like
    math = _Math

    @staticmethod
    def cast(value: Any, dtype: torch.dtype) -> Any:
        return value.to(dtype)


class RuleOptimizer(torch.optim.Optimizer):
    """Applies the rule of an `OptimMethod` to every parameter that has a gradient.

    The number of steps, from which the learning rate follows, is in the parameter group, and so in
    checkpoints.

    Args:
        params: The parameters.
        method: The rule.
        regularizers: What is added to the gradients of some parameters.
        limits: Gradients are clipped between these, if any.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        method: OptimMethod,
        regularizers: Iterable[tuple[nn.Parameter, Regularizer]] = (),
        limits: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(params, {"lr": method.rate(0), "neval": 0})
        self._method, self._limits = method, limits
        self._regularizers = {id(parameter): regularizer for parameter, regularizer in regularizers}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            made = int(group["neval"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, made, self._method.rate(made))
            group["neval"] = made + 1
            group["lr"] = self._method.rate(made + 1)

    def _move(self, parameter: nn.Parameter, made: int, rate: float) -> None:
        gradient = self._gradient(parameter)
        kept = self.state[parameter]
        if not kept:
            kept.update({n: torch.full_like(parameter, v) for n, v in self._method.slots.items()})
        number = torch.tensor(float(made + 1), device=parameter.device)
        new, after = self._method.new_value(_Operations, parameter.data, gradient, dict(kept), rate, number)
        parameter.copy_(new)
        for name, value in after.items():
            kept[name].copy_(value)

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None
        regularizer = self._regularizers.get(id(parameter))
        if regularizer is not None:
            gradient = gradient + regularizer.gradient(parameter)
        return gradient if self._limits is None else gradient.clamp(*self._limits)


class TorchRule:
    """Creates the optimizer of a model, as `Estimator.from_torch(optimizer=...)` takes creators.

    Args:
        method: BigDL's optimizer.
        limits: Gradients are clipped between these, if any.
    """

    def __init__(self, method: OptimMethod, limits: tuple[float, float] | None = None) -> None:
        if isinstance(method, LBFGS):
            raise ConfigError(
                "LBFGS trains graphs of TensorFlow only.\nHint: use Adam, or SGD with momentum."
            )
        self.method, self.limits = method, limits

    def __call__(self, model: nn.Module, config: Mapping[str, Any]) -> RuleOptimizer:
        trained = [parameter for parameter in nn.Module.parameters(model) if parameter.requires_grad]
        return RuleOptimizer(trained, self.method, regularized(model), self.limits)
