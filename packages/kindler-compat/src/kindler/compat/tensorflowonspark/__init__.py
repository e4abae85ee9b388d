"""The interface of TensorFlowOnSpark on Kindler's clusters: change the imports, keep the program.

Nothing calls `sys.exit` or stops the session; errors of nodes are raised. See the guide on moving.
"""
