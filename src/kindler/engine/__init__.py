"""Supervised gangs of worker processes: how they start, are watched, and end."""
