"""The table of frameworks: a backend is a row, and its code loads on first use.

Importing this module loads no framework. What the loaded classes promise is in `contract.py`.
"""

from __future__ import annotations

from kindler.registry import Registry, Spec

__all__ = ["FRAMEWORKS"]

FRAMEWORKS = Registry(
    "framework",
    [
        Spec(
            name="torch",
            target="kindler.frameworks.torch.replica:TorchReplica",
            package="torch",
            extra="torch",
            preload="kindler.frameworks.torch.replica:preload",
        ),
        Spec(
            name="keras",
            target="kindler.frameworks.keras.replica:KerasReplica",
            package="keras",
            extra="keras",
            preload="kindler.frameworks.keras.replica:preload",
        ),
    ],
    group="kindler.frameworks",
)
