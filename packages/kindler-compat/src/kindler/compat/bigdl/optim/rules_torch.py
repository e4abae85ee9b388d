"""BigDL's optimizers as optimizers of torch: the same formulas as in graphs, see `methods.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kindler.compat.bigdl.nn.base import regularized
from kindler.compat.bigdl.nn.regularizers import Regularizer
from kindler.compat.bigdl.optim.methods import LBFGS, OptimMethod
from kindler.errors import ConfigError

__all__ = ["RuleOptimizer", "TorchRule", "refuse_regularizers"]


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
        resume: Whether to go on from where the method was used last; None is if `Optimizer` used it, here or
            before it was saved.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        method: OptimMethod,
        regularizers: Iterable[tuple[nn.Parameter, Regularizer]] = (),
        limits: tuple[float, float] | None = None,
        *,
        resume: bool | None = None,
    ) -> None:
        resume = bool(method.kept) if resume is None else resume
        made = method.state["neval"] - 1 if resume else 0
        super().__init__(params, {"lr": method.rate(made), "neval": made})
        self._method, self._limits = method, limits
        self._regularizers = {id(parameter): regularizer for parameter, regularizer in regularizers}
        if resume and any(method.kept):
            self._resume(method.kept)

    def kept(self) -> list[dict[str, Any]]:
        """What is kept beside each parameter, as arrays."""
        states = [
            self.state.get(parameter, {}) for group in self.param_groups for parameter in group["params"]
        ]
        return [{name: value.cpu().numpy() for name, value in state.items()} for state in states]

    def _resume(self, kept: Sequence[Mapping[str, Any]]) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        wrong = len(kept) != len(parameters) or any(
            tuple(value.shape) != tuple(parameter.shape)
            for parameter, state in zip(parameters, kept, strict=False)
            for value in state.values()
        )
        if wrong:
            raise ConfigError(
                f"{self._method!r} was used for a model with other parameters, and goes on from there.\n"
                "Hint: make a new one for this model."
            )
        for parameter, state in zip(parameters, kept, strict=True):
            self.state[parameter] = {name: torch.tensor(value) for name, value in state.items()}

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
        resume: Whether to go on from where the method was used last; None is if `Optimizer` used it, here or
            before it was saved.
    """

    def __init__(
        self, method: OptimMethod, limits: tuple[float, float] | None = None, *, resume: bool | None = None
    ) -> None:
        if isinstance(method, LBFGS):
            raise ConfigError(
                "LBFGS trains graphs of TensorFlow only.\nHint: use Adam, or SGD with momentum."
            )
        self.method, self.limits, self.resume = method, limits, resume

    def __call__(self, model: nn.Module, config: Mapping[str, Any]) -> RuleOptimizer:
        trained = [parameter for parameter in nn.Module.parameters(model) if parameter.requires_grad]
        return RuleOptimizer(trained, self.method, regularized(model), self.limits, resume=self.resume)


def refuse_regularizers(model: Any) -> None:
    """Complain about regularizers of layers where an optimizer of torch would leave them out.

    Raises:
        ConfigError: A layer of the model has one.
    """
    if isinstance(model, nn.Module) and any(True for _ in regularized(model)):
        raise ConfigError(
            "layers of the model have regularizers, which optimizers of torch do not know.\n"
            "Hint: use one of bigdl.optim.optimizer, or weight_decay of torch's instead of regularizers."
        )
