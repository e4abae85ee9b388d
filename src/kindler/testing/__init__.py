"""Contracts of Kindler's parts as tests: subclass one, give its fixtures, and run pytest. Needs pytest."""
