"""A frozen TensorFlow graph as a PyTorch module."""

from __future__ import annotations

from typing import Any

import torch


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, frozen: Any, *inputs: Any) -> Any:
        arrays = [part.detach().cpu().numpy() for part in inputs]
        ctx.frozen, ctx.arrays = frozen, arrays
        outputs = [torch.from_numpy(output.copy()).to(inputs[0].device) for output in frozen.run(arrays)]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = [gradient.detach().cpu().numpy() for gradient in gradients]
        found = ctx.frozen.gradients(ctx.arrays, given)
        return None, *(torch.from_numpy(gradient.copy()).to(gradients[0].device) for gradient in found)


class TFNetModule(torch.nn.Module):
    """Runs a frozen graph; it has no parameters, and passes gradients on to its inputs."""

    def __init__(self, frozen: Any) -> None:
        super().__init__()
        self.frozen = frozen

    def forward(self, *inputs: Any) -> Any:
        return _Run.apply(self.frozen, *inputs)  # type: ignore[no-untyped-call]
