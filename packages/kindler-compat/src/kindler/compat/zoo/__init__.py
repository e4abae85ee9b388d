"""Analytics Zoo's module paths.

`from zoo.tfpark import ...` becomes `from kindler.compat.zoo.tfpark import ...`.
"""

from __future__ import annotations

from kindler.compat.not_provided import refuse_the_rest
from kindler.compat.zoo.common.nncontext import (
    getOrCreateSparkContext,
    init_nncontext,
    init_spark_conf,
    init_spark_on_local,
)

__all__ = ["getOrCreateSparkContext", "init_nncontext", "init_spark_conf", "init_spark_on_local"]

refuse_the_rest()
