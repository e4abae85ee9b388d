"""`zoo.pipeline.api.net`: the older home of TFPark's names."""

from __future__ import annotations

from kindler.compat.zoo.tfpark import TFDataset, TFNet, TFOptimizer, TFPredictor

__all__ = ["TFDataset", "TFNet", "TFOptimizer", "TFPredictor"]
