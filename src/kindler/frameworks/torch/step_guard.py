"""Reports steps whose loss is NaN or infinite, and skips them on request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kindler.collective import Collective
from kindler.frameworks.labels import LabelSource
from kindler.frameworks.torch.buffers import Tracked
from kindler.frameworks.torch.state import snapshot

if TYPE_CHECKING:
    from kindler.train.loss_guard import LossGuard

_SHOWN_ROWS = 8


class StepGuard:
    def __init__(self, watch: LossGuard, names: Sequence[str]) -> None:
        self._watch, self._names = watch, names
        self._buffers: list[torch.Tensor] = []
        self._bad = False

    @property
    def skips(self) -> bool:
        """Skipping needs every loss at once."""
        return self._watch.skips

    def begin_step(self, tracked: Tracked) -> None:
        if self.skips:
            self.begin_own_step()
            self._buffers = snapshot(tracked)

    def begin_own_step(self) -> None:
        """The caller undoes the step itself if it is `bad`."""
        self._bad = False

    @property
    def bad(self) -> bool:
        """Knows only this rank's losses and gradients."""
        return self.skips and self._bad

    def look_at_gradients(self, gradients: Iterable[torch.Tensor | None]) -> None:
        if self.skips and not self._bad:
            self._bad = not _all_finite([gradient for gradient in gradients if gradient is not None])

    def skip(self) -> None:
        self._watch.skip()

    def passes(
        self, step: int, loss: torch.Tensor, features: Sequence[torch.Tensor], source: LabelSource, rows: int
    ) -> bool:
        """False if the loss is not finite and steps are skipped."""
        if loss.is_cuda and not self.skips:
            if not torch.cuda.is_current_stream_capturing():
                self.replayed(step, loss.detach(), source, rows)
            return True
        if not self._watch.saw(
            step, loss.item(), lambda: (_rows(source, rows), self._oddity(features, source))
        ):
            self._bad = True
        return not (self._bad and self.skips)

    def replayed(self, step: int, loss: torch.Tensor, source: LabelSource, rows: int) -> None:
        """Looks at it soon, without waiting for the GPU."""
        self._watch.note(step, loss, _Shown(source.where, rows), _brought)  # which does not keep the batch

    def left_out(
        self,
        parameters: Iterable[torch.nn.Parameter],
        tracked: Tracked,
        others: Collective | None,
        *,
        scaled: bool,
    ) -> bool:
        """After the exchange of gradients; all ranks decide alike."""
        if not self.skips:
            return False
        bad = self._bad or not (scaled or _all_finite([p.grad for p in parameters if p.grad is not None]))
        if others is not None:
            [count] = others.sum([np.array([bad], np.int64)])
            bad = bool(count[0])
        if bad:
            with torch.no_grad():
                for buffer, before in zip(tracked.buffers(), self._buffers, strict=True):
                    buffer.copy_(before)
            self._watch.skip()
        self._buffers = []
        return bad

    def _oddity(self, features: Sequence[torch.Tensor], source: LabelSource) -> str:
        for place, feature in enumerate(features):
            if not feature.is_floating_point() or not len(feature):
                continue
            bad = ~torch.isfinite(feature.reshape(len(feature), -1)).all(dim=1)
            if bool(bad.any()):
                row = int(bad.int().argmax())
                name = repr(self._names[place]) if place < len(self._names) else f"input {place}"
                return f"Row {source.where(row)} has a value in {name} that is not finite."
        return ""


class _Shown:
    def __init__(self, where: Any, rows: int) -> None:
        self._where, self._rows = where, rows

    def __call__(self) -> tuple[list[int | str], str]:
        return [self._where(row) for row in range(min(self._rows, _SHOWN_ROWS))], ""


def _rows(source: LabelSource, rows: int) -> list[int | str]:
    return _Shown(source.where, rows)()[0]


def _brought(losses: Sequence[torch.Tensor]) -> list[float]:
    values: list[float] = torch.stack([loss.float() for loss in losses]).tolist() if losses else []
    return values


def _all_finite(gradients: list[torch.Tensor]) -> bool:
    return not gradients or bool(
        torch.isfinite(torch.stack(torch._foreach_norm(gradients, float("inf")))).all()
    )
