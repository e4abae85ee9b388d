"""`bigdl.dllib`: the later home of `bigdl.nn`, `bigdl.optim` and `bigdl.util`, which it calls `utils`, and of
`zoo.pipeline.nnframes`."""

from __future__ import annotations

from kindler.compat.bigdl.alias import alias

alias("kindler.compat.bigdl.dllib.nn", "kindler.compat.bigdl.nn")
alias("kindler.compat.bigdl.dllib.optim", "kindler.compat.bigdl.optim")
alias("kindler.compat.bigdl.dllib.utils", "kindler.compat.bigdl.util")
alias("kindler.compat.bigdl.dllib.nnframes", "kindler.compat.zoo.pipeline.nnframes")
