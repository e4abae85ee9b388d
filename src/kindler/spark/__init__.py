"""Spark at the border: the only folder that imports pyspark."""
