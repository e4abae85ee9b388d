"""`zoo.orca.learn.trigger`."""

from __future__ import annotations

from kindler.compat.bigdl.optim.triggers import EveryEpoch, SeveralIteration

__all__ = ["EveryEpoch", "SeveralIteration"]
