"""Shards without a home: objects as Arrow or pickle, their rows cut and joined, tables sorted and grouped."""
