"""Apache MXNet: Gluon blocks. Here: the config of an estimator, which all creators are called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["create_config"]


def create_config(
    optimizer: str = "sgd",
    optimizer_params: Mapping[str, Any] | None = None,
    log_interval: int = 10,
    seed: int | None = None,
    extra_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the config of an MXNet estimator.

    Args:
        optimizer: The name of an MXNet optimizer.
        optimizer_params: Its arguments; None is a learning rate of 0.01.
        log_interval: Kept for creators that read it; progress does not depend on it.
        seed: Decides the initial weights and the order of rows.
        extra_config: More entries, for creators.

    >>> create_config(optimizer="adam", optimizer_params={"learning_rate": 0.02})["optimizer"]
    'adam'
    """
    config: dict[str, Any] = {
        "optimizer": optimizer,
        "optimizer_params": dict(optimizer_params or {"learning_rate": 0.01}),
        "log_interval": log_interval,
    }
    if seed is not None:
        config["seed"] = seed
    return {**config, **(extra_config or {})}
