"""`bigdl.dllib`: the later home of modules of `bigdl`, and of `zoo.pipeline.nnframes`."""
