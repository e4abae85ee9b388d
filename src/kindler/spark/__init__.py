"""The border to Spark: the only folder that imports pyspark."""
