"""BigDL's module paths: `bigdl.nn.layer` is `kindler.compat.bigdl.nn.layer`, and so on."""
