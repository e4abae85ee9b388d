"""Deep models as stages of Spark ML pipelines.

`est.as_stage(...)` makes a stage of any `kindler.Estimator`; `pretrained(...)` makes one of a model that is
trained already. Both work as Spark's own stages do, in a Pipeline, a CrossValidator or a
TrainValidationSplit, on classic sessions and on Spark Connect, and `PipelineModel.load` reads them.
"""

from __future__ import annotations

from kindler.errors import MissingExtraError

try:
    import pyspark  # noqa: F401
except ModuleNotFoundError as exc:
    raise MissingExtraError(what="kindler.ml", package="pyspark", extra="spark") from exc

from kindler.ml.estimator import KindlerEstimator
from kindler.ml.model import KindlerModel, PretrainedModel, pretrained
from kindler.ml.persistence import trusting

__all__ = ["KindlerEstimator", "KindlerModel", "PretrainedModel", "pretrained", "trusting"]
