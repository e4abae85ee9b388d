"""Shards wherever they live: packed as Arrow or pickle, cut and joined, sorted and grouped."""
