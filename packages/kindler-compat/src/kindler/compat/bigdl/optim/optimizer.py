"""`bigdl.optim.optimizer`: optimizers, learning-rate schedules, triggers, summaries, validation methods."""

from __future__ import annotations

from kindler.compat.bigdl.nn.regularizers import L1L2Regularizer, L1Regularizer, L2Regularizer
from kindler.compat.bigdl.optim import methods, schedules, training, triggers
from kindler.compat.bigdl.optim.methods import *  # noqa: F403
from kindler.compat.bigdl.optim.schedules import *  # noqa: F403
from kindler.compat.bigdl.optim.summaries import TrainSummary, ValidationSummary
from kindler.compat.bigdl.optim.training import *  # noqa: F403
from kindler.compat.bigdl.optim.triggers import *  # noqa: F403
from kindler.compat.bigdl.optim.validation import (
    AUC,
    MAE,
    MSE,
    NDCG,
    HitRatio,
    Loss,
    Top1Accuracy,
    Top5Accuracy,
    TreeNNAccuracy,
    ValidationMethod,
)

__all__ = [  # noqa: PLE0604 - the names of all parts
    "AUC",
    "MAE",
    "MSE",
    "NDCG",
    "HitRatio",
    "L1L2Regularizer",
    "L1Regularizer",
    "L2Regularizer",
    "Loss",
    "Top1Accuracy",
    "Top5Accuracy",
    "TrainSummary",
    "TreeNNAccuracy",
    "ValidationMethod",
    "ValidationSummary",
    *methods.__all__,
    *(name for name in schedules.__all__ if name != "Schedule"),
    *training.__all__,
    *triggers.__all__,
]
