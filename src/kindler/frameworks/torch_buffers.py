"""What training changes besides weights: buffers, as BatchNorm's statistics, made the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from kindler.errors import ConfigError
from kindler.frameworks.torch_state import Collective

__all__ = ["Buffers"]


class Buffers:
    """The buffers of a model (and of its loss), by name.

    Args:
        modules: Those that have buffers, by a prefix for their names.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._known = tuple(self.named())
        self._before: dict[str, torch.Tensor] = {}
        self._changed: set[str] = set()

    def named(self) -> dict[str, torch.Tensor]:
        """All of them, as they are now."""
        return {
            prefix + name: buffer
            for prefix, module in self._modules.items()
            for name, buffer in module.named_buffers()
        }

    def watch(self) -> None:
        """From now on, note which of them change."""
        self._before = {name: buffer.detach().clone() for name, buffer in self.named().items()}
        self._changed = set()

    def refuse_new(self) -> None:
        """Complain about buffers that came after the model was made: no other copy of the model has them."""
        new = [name for name in self._persistent() if name not in self._known]
        if new:
            raise ConfigError(
                f"the model has registered the buffer {new[0]!r} while it was trained; a copy of the"
                f" model made"
                " elsewhere would not have it, so its weights could not be loaded.\n"
                "Hint: register it in __init__, with its final shape; or with persistent=False, if it can be"
                " computed anew."
            )

    def changed(self) -> list[str]:
        """Which this rank has changed since `watch`, also before it was interrupted."""
        now = self.named()
        return [name for name in self._known if name in self._changed or not self._as_before(name, now)]

    def restore(self, changed: Sequence[str], values: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `changed` and `named` gave."""
        now = self.named()
        with torch.no_grad():
            for name in values.keys() & now.keys():
                now[name].copy_(values[name])
        self._changed = set(changed)

    def merge(self, group: Collective, rows: int) -> None:
        """Make those that changed on some rank the same on all.

        Running statistics become the mean weighted by rows; counters become the largest. Buffers that no rank
        changed (masks, tables) are left alone, bit by bit; so are those that only serve as a memory
        (persistent=False) and have another shape on some rank.
        """
        if not self._known:
            return
        now, changed = self.named(), set(self.changed())
        marks = [name in changed for name in self._known]
        marks += [name not in now or now[name].shape != self._before[name].shape for name in self._known]
        flags = torch.tensor(marks, dtype=torch.int64, device=next(iter(now.values())).device)
        group.all_reduce(flags).wait()
        told = flags.tolist()
        moved, reshaped = told[: len(self._known)], told[len(self._known) :]
        self._refuse_reshaped([n for n, flag in zip(self._known, reshaped, strict=True) if flag])
        pairs = zip(self._known, moved, reshaped, strict=True)
        buffers = [now[name].detach() for name, flag, other in pairs if flag and not other]
        real = [torch.view_as_real(buffer) if buffer.is_complex() else buffer for buffer in buffers]
        _mean(group, [buffer for buffer in real if buffer.is_floating_point()], rows)
        _maximum(group, [buffer for buffer in real if not buffer.is_floating_point()])

    def _as_before(self, name: str, now: Mapping[str, torch.Tensor]) -> bool:
        return name in now and name in self._before and torch.equal(now[name], self._before[name])

    def _persistent(self) -> Iterator[str]:
        for prefix, module in self._modules.items():
            for path, part in module.named_modules():
                for name, buffer in part._buffers.items():
                    if buffer is not None and name not in part._non_persistent_buffers_set:
                        yield f"{prefix}{path}.{name}" if path else prefix + name

    def _refuse_reshaped(self, names: Sequence[str]) -> None:
        lasting = set(self._persistent()) & set(names)
        if lasting:
            raise ConfigError(
                f"the buffer {min(lasting)!r} got another shape while the model was trained; such buffers"
                f" cannot"
                " be the same on all workers.\nHint: register it with its final shape, or with"
                " persistent=False."
            )


def _mean(group: Collective, buffers: list[torch.Tensor], rows: int) -> None:
    if not buffers:
        return
    flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers])
    # A rank without rows adds nothing, whatever its buffers hold: 0 * inf would be NaN.
    flat = flat * rows if rows else torch.zeros_like(flat)
    weighted = torch.cat([flat, flat.new_tensor([float(rows)])])
    group.all_reduce(weighted).wait()
    if weighted[-1] > 0:
        _write(buffers, weighted[:-1] / weighted[-1])


def _maximum(group: Collective, buffers: list[torch.Tensor]) -> None:
    if not buffers:
        return
    flat = torch.cat([buffer.reshape(-1).to(torch.int64) for buffer in buffers])
    # Only sums travel: each rank fills its own line of a table of zeros.
    table = flat.new_zeros((group.size, flat.numel()))
    table[group.rank] = flat
    group.all_reduce(table).wait()
    _write(buffers, table.amax(dim=0))


def _write(buffers: list[torch.Tensor], flat: torch.Tensor) -> None:
    start = 0
    for buffer in buffers:
        buffer.copy_(flat[start : start + buffer.numel()].reshape(buffer.shape))
        start += buffer.numel()
