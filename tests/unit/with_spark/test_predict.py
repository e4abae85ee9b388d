"""What Spark's executors are sent to score with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from kindler import Estimator

pytestmark = pytest.mark.spark


def test_a_model_that_is_not_changed_is_brought_to_the_executors_once(spark: Any) -> None:
    from kindler.spark.tasks import lent

    model = nn.Linear(1_000, 300)  # more than a task carries
    est = Estimator.from_torch(model=model)
    frame = spark.createDataFrame([([1.0] * 1_000,)], "features array<float>")

    def scored() -> Any:
        [row] = est.predict(frame, feature_cols="features").collect()
        return np.array(row.prediction)

    def held() -> Any:
        packed = est._live.for_scoring()
        return lent(spark, f"{packed.content}-spec", packed.spec)

    first, before = scored(), held()
    assert scored() == pytest.approx(first)
    assert held() is before

    model.bias.data += 1

    assert scored() == pytest.approx(first + 1, abs=1e-4)
    assert held() is not before
