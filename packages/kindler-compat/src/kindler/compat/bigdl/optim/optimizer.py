"""`bigdl.optim.optimizer`: optimizers, learning-rate schedules, triggers, summaries, validation methods."""

from __future__ import annotations

from kindler.compat.bigdl.nn.regularizers import L1L2Regularizer, L1Regularizer, L2Regularizer
from kindler.compat.bigdl.optim import methods, schedules, summaries, training, triggers, validation
from kindler.compat.bigdl.optim.methods import *  # noqa: F403
from kindler.compat.bigdl.optim.schedules import *  # noqa: F403
from kindler.compat.bigdl.optim.summaries import *  # noqa: F403
from kindler.compat.bigdl.optim.training import *  # noqa: F403
from kindler.compat.bigdl.optim.triggers import *  # noqa: F403
from kindler.compat.bigdl.optim.validation import *  # noqa: F403

_PARTS = (methods, schedules, summaries, training, triggers, validation)
_INTERNAL = {"Schedule", "Scores", "Summary", "Recorder", "named", "tag_of"}
_NAMES = [name for part in _PARTS for name in part.__all__ if name not in _INTERNAL]
__all__ = ["L1L2Regularizer", "L1Regularizer", "L2Regularizer", *_NAMES]  # noqa: PLE0604 - names
