"""`zoo.orca.learn.optimizers.schedule`: learning-rate schedules."""

from kindler.compat.bigdl.optim.schedules import *  # noqa: F403
