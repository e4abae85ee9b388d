"""BigDL's module paths: `bigdl.nn.layer` is `kindler.compat.bigdl.nn.layer`, and so on."""

from __future__ import annotations

from kindler.compat.not_provided import refuse_the_rest

refuse_the_rest()
