"""Which buffers of a model training may change; `state.py` merges them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from kindler.collective import Collective
from kindler.errors import ConfigError


class Tracked:
    """The buffers that modules had when training began; complex ones as pairs of reals.

    Later ones are left out: a copy of the model made elsewhere would not have them.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = modules
        self._names = [name for name, _ in self._named()]

    def buffers(self) -> Iterator[torch.Tensor]:
        now = dict(self._named())
        for name in self._names:
            buffer = now.get(name)
            if buffer is None:
                raise ConfigError(
                    f"the buffer {_shown(name)!r} has been taken from the model while it was trained."
                )
            yield torch.view_as_real(buffer) if buffer.is_complex() else buffer

    def modules(self) -> Iterator[nn.Module]:
        return (part for module in self._modules for part in module.modules())

    def refuse_new(self) -> None:
        known = set(self._names)
        new = [name for name in self._lasting() if name not in known]
        if new:
            raise ConfigError(
                f"the model has registered the buffer {_shown(new[0])!r} while it was trained; a copy of the"
                " model made elsewhere does not have it, and could not load its weights.\n"
                "Hint: register it in __init__, with its final shape; or with persistent=False, if it can be"
                " computed anew."
            )

    def reshaped(self, collective: Collective, before: Sequence[torch.Tensor]) -> list[bool]:
        """True for buffers of another shape on some rank, which cannot be merged; every rank calls it."""
        now = list(self.buffers())
        if not now:
            return []
        mine = [buffer.shape != then.shape for buffer, then in zip(now, before, strict=True)]
        found = [bool(flag) for flag in collective.sum([np.array(mine, np.int64)])[0]]
        lasting = set(self._lasting())
        for name, flag in zip(self._names, found, strict=True):
            if flag and name in lasting:
                raise ConfigError(
                    f"the buffer {_shown(name)!r} got another shape while the model was trained, so it"
                    " cannot be made the same on all workers.\n"
                    "Hint: register it with its final shape, or with persistent=False."
                )
        return found

    def _named(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        for number, module in enumerate(self._modules):
            for name, buffer in module.named_buffers():
                yield (number, name), buffer

    def _lasting(self) -> Iterator[tuple[int, str]]:
        for number, module in enumerate(self._modules):
            for path, part in module.named_modules():
                for name, buffer in part._buffers.items():
                    if buffer is not None and name not in part._non_persistent_buffers_set:
                        yield number, f"{path}.{name}" if path else name


def _shown(name: tuple[int, str]) -> str:
    return name[1]
