"""The interface of TensorFlowOnSpark on Kindler's clusters: change the imports, keep the program.

Nothing calls `sys.exit` or stops the session; errors of nodes are raised. See the guide on moving.
"""

from kindler.compat.bigdl.alias import alias

for _old, _new in {
    "TFNodeContext": "TFNode",
    "marker": "TFNode",
    "compat": "util",
    "gpu_info": "util",
}.items():
    alias(f"{__name__}.{_old}", f"{__name__}.{_new}")
