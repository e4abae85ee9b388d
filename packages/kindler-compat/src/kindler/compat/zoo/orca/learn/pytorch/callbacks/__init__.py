"""`orca.learn.pytorch.callbacks`."""

from __future__ import annotations

from kindler.compat.zoo.orca.learn.pytorch.callbacks.base import Callback
from kindler.compat.zoo.orca.learn.pytorch.callbacks.maincallback import MainCallback
from kindler.compat.zoo.orca.learn.pytorch.callbacks.maxsteps import MaxstepsCallback
from kindler.compat.zoo.orca.learn.pytorch.callbacks.model_checkpoint import ModelCheckpoint
from kindler.compat.zoo.orca.learn.pytorch.callbacks.tensorboard import TensorBoardCallback

__all__ = ["Callback", "MainCallback", "MaxstepsCallback", "ModelCheckpoint", "TensorBoardCallback"]
