"""BigDL's optimizers as optimizers of torch, with the formulas of `methods.py`, and its validation methods.

Means over rows are functions of (outputs, targets). What is not a mean over rows (AUC) is a metric of
torchmetrics, which takes seconds to import in every worker: only what uses it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from kindler.compat.bigdl.nn.base import regularized
from kindler.compat.bigdl.nn.criterion import Criterion
from kindler.compat.bigdl.nn.regularizers import Regularizer
from kindler.compat.bigdl.optim.methods import LBFGS, OptimMethod
from kindler.compat.bigdl.optim.validation import AUC, Loss, ValidationMethod
from kindler.errors import ConfigError

# The operations of the formulas, under TensorFlow's names.
_OPERATIONS = SimpleNamespace(
    **{name: getattr(torch, name) for name in ("float64", "where", "sqrt", "abs", "sign", "maximum")},
    ones_like=torch.ones_like,
    zeros_like=torch.zeros_like,
    cast=torch.Tensor.to,
    math=SimpleNamespace(divide_no_nan=lambda a, b: torch.where(b == 0, torch.zeros_like(a), a / b)),
)


class RuleOptimizer(torch.optim.Optimizer):
    """Applies the rule of an `OptimMethod` to every parameter that has a gradient; see `TorchRule`.

    The number of steps, from which the learning rate follows, is in the parameter group, and so in
    checkpoints.
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
        states = [self.state.get(parameter, {}) for parameter in self._all()]
        return [{name: value.cpu().numpy() for name, value in state.items()} for state in states]

    def _all(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _resume(self, kept: Sequence[Mapping[str, Any]]) -> None:
        parameters = self._all()
        wrong = len(kept) != len(parameters) or any(
            tuple(value.shape) != tuple(parameter.shape)
            for parameter, state in zip(parameters, kept, strict=False)
            for value in state.values()
        )
        if wrong:
            raise ConfigError(
                f"{self._method!r} was used for a model with other parameters, and continues from there.\n"
                "Hint: create a new one for this model."
            )
        for parameter, state in zip(parameters, kept, strict=True):
            self.state[parameter] = {name: torch.tensor(value) for name, value in state.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            made = int(group["neval"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, made, self._method.rate(made))
            group["neval"] = made + 1
            group["lr"] = self._method.rate(made + 1)

    def _move(self, parameter: Any, made: int, rate: float) -> None:
        gradient, kept = parameter.grad, self.state[parameter]
        if (regularizer := self._regularizers.get(id(parameter))) is not None:
            gradient = gradient + regularizer.gradient(parameter)
        if self._limits is not None:
            gradient = gradient.clamp(*self._limits)
        if not kept:
            kept.update({n: torch.full_like(parameter, v) for n, v in self._method.slots.items()})
        number = torch.tensor(float(made + 1), device=parameter.device)
        new, after = self._method.new_value(_OPERATIONS, parameter.data, gradient, dict(kept), rate, number)
        parameter.copy_(new)
        for name, value in after.items():
            kept[name].copy_(value)


class TorchRule:
    """Creates the optimizer of a model, as `Estimator.from_torch(optimizer=...)` takes creators.

    Gradients are clipped between `limits`, if any. `resume` says whether to go on from where the method was
    used last; None is if `Optimizer` used it, here or before it was saved.
    """

    def __init__(
        self, method: OptimMethod, limits: tuple[float, float] | None = None, *, resume: bool | None = None
    ) -> None:
        if isinstance(method, LBFGS):
            raise ConfigError("LBFGS trains TensorFlow graphs only.\nHint: use Adam, or SGD with momentum.")
        self.method, self.limits, self.resume = method, limits, resume

    def __call__(self, model: nn.Module, config: Mapping[str, Any]) -> RuleOptimizer:
        trained = [parameter for parameter in nn.Module.parameters(model) if parameter.requires_grad]
        return RuleOptimizer(trained, self.method, regularized(model), self.limits, resume=self.resume)


def refuse_regularizers(model: Any) -> None:
    """Complain about regularizers of layers where an optimizer of torch would leave them out."""
    if isinstance(model, nn.Module) and any(True for _ in regularized(model)):
        raise ConfigError(
            "layers of the model have regularizers, which torch's optimizers ignore.\n"
            "Hint: use one of bigdl.optim.optimizer, or weight_decay of torch's instead of regularizers."
        )


def torch_metrics(methods: Sequence[ValidationMethod], loss: Any) -> dict[str, Any]:
    """Metrics by BigDL's names; the model's own `Loss`, which is always counted, is left out.

    If the labels of the loss are counted from 1, so are those of the methods.
    """
    one_based = isinstance(loss, Criterion) and loss.one_based
    metrics: dict[str, Any] = {}
    for method in methods:
        first = method.first_class if not one_based else 1
        if isinstance(method, AUC):
            from kindler.compat.bigdl.optim.exact_auc import ExactAUC

            metrics[method.tag] = ExactAUC(float(first if method.by_class else 0))
        elif (counted := getattr(method, "counted", None)) is not None:
            import torchmetrics

            metrics[method.tag] = getattr(torchmetrics.classification, counted)(validate_args=False)
        elif not isinstance(method, Loss) or method.cri not in (None, loss):
            metrics[method.tag] = RowMean(method, first if method.by_class else 0)
    return metrics


class RowMean:
    """The mean of a validation method over the rows of a batch."""

    def __init__(self, method: ValidationMethod, first: int) -> None:
        if method.rows is not None:
            raise ConfigError(
                f"{method!r} evaluates groups of {method.rows} rows, which batches would split.\n"
                "Hint: method.score(outputs, labels) evaluates the arrays of predict."
            )
        self.method, self.first = method, first

    def __call__(self, outputs: Any, targets: Any) -> float:
        output, label = (part[0] if isinstance(part, tuple | list) else part for part in (outputs, targets))
        return self.method.score(output.cpu().numpy(), np.asarray(label.cpu().numpy()) - self.first)
