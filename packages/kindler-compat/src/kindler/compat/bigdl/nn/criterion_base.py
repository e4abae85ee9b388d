"""`Criterion`: a loss of torch with the methods that BigDL's criteria have, and how labels are read.

A criterion returns a mean over rows unless `size_average=False`, in which case it is a sum. Means that divide
by something else than rows say by what, so that workers with uneven rows weigh theirs exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from kindler.compat.bigdl.nn.conversion import are_arrays, gradients_of, to_tensors
from kindler.errors import DataError

__all__ = ["Criterion", "class_numbers", "like"]


class Criterion(nn.Module):
    """Base class of criteria.

    Subclasses define `compute`. Those that take class numbers, counted from 1, set `one_based`.

    Args:
        size_average: Whether the loss is a mean; otherwise it is a sum.
        bigdl_type: Without effect.
    """

    one_based = False

    def __init__(self, size_average: bool = True, bigdl_type: str = "float") -> None:
        super().__init__()
        self.reduction = "mean" if size_average else "sum"  # as torch's losses say it
        self.size_average, self.bigdl_type = size_average, bigdl_type

    def compute(self, output: Any, target: Any) -> Any:
        """The loss of a batch."""
        raise NotImplementedError

    def forward(self, *values: Any) -> Any:
        """The loss of an output, or a list of them, and a target: a tensor, or a number for arrays."""
        output, target = _halves(values)
        if are_arrays(output):
            return float(self(to_tensors(output), to_tensors(target)).item())
        return self.compute(output, target)

    def backward(self, output: Any, target: Any) -> Any:
        """The gradient of the loss with respect to the output, for arrays."""
        tracked = to_tensors(output, tracked=True)
        with torch.enable_grad():
            self(tracked, to_tensors(target)).backward()
        return gradients_of(tracked)

    def reduced(self, values: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """The mean of values, or over so many rows; their sum where that is asked for."""
        if not self.size_average:
            return values.sum()
        return values.mean() if rows is None else values.sum() / rows


def _halves(values: tuple[Any, ...]) -> tuple[Any, Any]:
    """Outputs and targets; the training loop passes those of tables one after the other."""
    if len(values) == 2:
        return values[0], values[1]
    half = len(values) // 2
    if len(values) == 2 * half:
        return list(values[:half]), list(values[half:])
    return list(values[:-1]), values[-1]


def class_numbers(target: torch.Tensor, classes: int, *, ignored: int | None = None) -> torch.Tensor:
    """Class numbers counted from 0, one a row, out of labels counted from 1.

    Args:
        target: The labels, as whole numbers of any dtype.
        classes: How many classes there are.
        ignored: A label that stands for none; it becomes -1.

    Raises:
        DataError: A label is not a class number.
    """
    flat = target.reshape(target.shape[0], -1).squeeze(-1) if target.dim() > 1 else target
    numbers = flat.long()
    none = numbers == ignored if ignored is not None else torch.zeros_like(numbers, dtype=torch.bool)
    if not flat.is_cuda:  # a GPU would have to be waited for
        wrong = (((numbers < 1) | (numbers > classes)) & ~none) | (flat != numbers)
        if bool(wrong.any()):
            raise DataError(
                f"labels must be whole numbers from 1 to {classes}, the number of outputs; received"
                f" {flat[wrong][0].item():g}.\n"
                "Hint: as in BigDL, the first class has the label 1; add 1 to labels that begin with 0."
            )
    return torch.where(none, torch.full_like(numbers, -1), numbers - 1)


def like(output: torch.Tensor, target: Any) -> torch.Tensor:
    """The target in the shape and the dtype of the output; nothing is ever broadcast.

    Raises:
        DataError: It has another number of values.
    """
    made = torch.as_tensor(np.asarray(target)) if not isinstance(target, torch.Tensor) else target
    if made.numel() != output.numel():
        raise DataError(
            f"the output has the shape {tuple(output.shape)} and the label {tuple(made.shape)}: this"
            " criterion needs one label value for each output value."
        )
    return made.reshape(output.shape).to(output.dtype)
