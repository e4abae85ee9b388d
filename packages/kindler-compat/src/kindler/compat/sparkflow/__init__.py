"""SparkFlow's interface on Kindler: change the prefix of imports, and programs written for it run.

`graph_utils`, `tensorflow_async`, `HogwildSparkModel`, `pipeline_util`, `tensorflow_model_loader` and
`ml_util` have the names that they have there.
"""

from kindler.compat.bigdl.alias import alias

alias(f"{__name__}.HogwildSparkModel", f"{__name__}.tensorflow_async")
