"""Steps whose loss is NaN or infinite: shown to whoever watches, and left out where that is asked for."""

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
    """Looks at the losses of one replica's training steps."""

    def __init__(self, watch: LossGuard, names: Sequence[str]) -> None:
        self._watch, self._names = watch, names
        self._buffers: list[torch.Tensor] = []
        self._bad = False

    @property
    def skips(self) -> bool:
        """Whether steps may be left out, for which every loss must be known at once."""
        return self._watch.skips

    def begin_step(self, tracked: Tracked) -> None:
        if self.skips:
            self.begin_own_step()
            self._buffers = snapshot(tracked)

    def begin_own_step(self) -> None:
        """Before a step that its caller undoes itself, where it is `bad`."""
        self._bad = False

    @property
    def bad(self) -> bool:
        """Whether steps are left out, and this one has a loss or gradient here that is not finite."""
        return self.skips and self._bad

    def look_at_gradients(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Where steps are left out: the step is `bad` if one of these is not finite."""
        if self.skips and not self._bad:
            self._bad = not _all_finite([gradient for gradient in gradients if gradient is not None])

    def skip(self) -> None:
        self._watch.skip()

    def passes(
        self, step: int, loss: torch.Tensor, features: Sequence[torch.Tensor], source: LabelSource, rows: int
    ) -> bool:
        """Whether the loss of a forward pass counts: unless it is not finite and steps are left out."""
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
        """A loss that is on a GPU: it is looked at soon, without waiting for it."""
        self._watch.note(step, loss, _Shown(source.where, rows), _brought)  # which does not keep the batch

    def left_out(
        self,
        parameters: Iterable[torch.nn.Parameter],
        tracked: Tracked,
        others: Collective | None,
        *,
        scaled: bool,
    ) -> bool:
        """After the exchange of gradients: whether this step is left out, on all ranks alike."""
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
        """Which row and column has a value that is not finite, if one has."""
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
    """The first rows of a batch by name."""

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
