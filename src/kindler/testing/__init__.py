"""Contract suites: test classes that a part of your own runs by subclassing them, as Kindler's own parts do.

Importing a suite needs pytest.
"""
