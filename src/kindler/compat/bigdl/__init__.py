"""BigDL's module paths: `bigdl.optim.optimizer` is `kindler.compat.bigdl.optim.optimizer`."""
