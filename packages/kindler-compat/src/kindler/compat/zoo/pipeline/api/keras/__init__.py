"""Module paths of Analytics Zoo."""
