"""`bigdl.dllib`: the later home of `bigdl.nn`, `bigdl.optim` and `bigdl.util`, and of `zoo.pipeline.nnframes`."""
