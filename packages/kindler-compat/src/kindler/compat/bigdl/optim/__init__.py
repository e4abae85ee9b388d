"""BigDL's optimizers, schedules, triggers, summaries and validation methods."""

from __future__ import annotations

from kindler.compat.bigdl.alias import alias

# Where regularizers were in earlier versions, by which pickled models name them.
alias(f"{__name__}.regularizers", "kindler.compat.bigdl.nn.regularizers")
