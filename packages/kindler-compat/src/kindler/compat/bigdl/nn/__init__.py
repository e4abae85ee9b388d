"""`bigdl.nn`: layers, criteria and ways to initialize weights."""

from __future__ import annotations

from kindler.compat.bigdl.alias import alias

# Where classes were in earlier versions, by which pickled models name them.
_BEFORE = {
    "layer": [
        "activations",
        "convolution",
        "linear",
        "normalization",
        "pooling",
        "recurrent",
        "shaping",
        "tables",
    ],
    "criterion": ["criterion_base"],
}
for _now, _names in _BEFORE.items():
    for _name in _names:
        alias(f"{__name__}.{_name}", f"{__name__}.{_now}")
