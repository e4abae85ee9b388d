"""`zoo.tfpark.gan`."""

from __future__ import annotations

from kindler.compat.zoo.tfpark.gan.gan_estimator import GANEstimator

__all__ = ["GANEstimator"]
