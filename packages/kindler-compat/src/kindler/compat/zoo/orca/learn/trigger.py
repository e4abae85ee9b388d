"""`zoo.orca.learn.trigger`."""

from kindler.compat.bigdl.optim.triggers import *  # noqa: F403
