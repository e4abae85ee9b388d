"""What tests with Spark share: those of units run in one process with tests/spark, on its session."""

from __future__ import annotations

from tests.spark.conftest import _environment_of_the_session, partitioned, spark

__all__ = ["_environment_of_the_session", "partitioned", "spark"]
