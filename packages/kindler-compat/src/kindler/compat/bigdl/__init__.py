"""BigDL's module paths: `bigdl.nn.layer` is `kindler.compat.bigdl.nn.layer`, and so on."""

from __future__ import annotations

from kindler.compat.bigdl.alias import alias
from kindler.compat.not_provided import refuse_the_rest

# Later homes of the same modules, and where classes were in earlier versions of Kindler, by which pickled
# models name them.
_LAYERS = [
    "activations",
    "convolution",
    "linear",
    "normalization",
    "pooling",
    "recurrent",
    "shaping",
    "tables",
]
_ALIASES = {
    "orca": "zoo.orca",
    "dllib.nn": "bigdl.nn",
    "dllib.optim": "bigdl.optim",
    "dllib.utils": "bigdl.util",
    "dllib.nnframes": "zoo.pipeline.nnframes",
    "dataset.transformer": "bigdl.dataset.mnist",
    "nn.criterion_base": "bigdl.nn.criterion",
    "optim.metrics_torch": "bigdl.optim.rules_torch",
    "optim.regularizers": "bigdl.nn.regularizers",
    **{f"nn.{name}": "bigdl.nn.layer" for name in _LAYERS},
}
for _name, _target in _ALIASES.items():
    alias(f"{__name__}.{_name}", f"kindler.compat.{_target}")
refuse_the_rest()
