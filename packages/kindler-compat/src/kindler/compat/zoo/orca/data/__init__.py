"""`zoo.orca.data`: partitioned data."""

from __future__ import annotations

from kindler import SharedValue, XShards
from kindler.compat.zoo.orca.data.image import read_images

__all__ = ["SharedValue", "SparkXShards", "XShards", "read_images"]

SparkXShards = XShards
# Orca's name, for whoever imports Orca's modules: shards of Kindler's readers have it, too.
XShards.assembleFeatureLabelCols = XShards.assemble_feature_label_cols  # type: ignore[attr-defined]
