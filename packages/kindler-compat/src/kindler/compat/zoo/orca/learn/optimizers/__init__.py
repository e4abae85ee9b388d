"""`zoo.orca.learn.optimizers`: BigDL's optimizers."""

from kindler.compat.bigdl.optim.methods import *  # noqa: F403
