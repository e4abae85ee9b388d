"""What `programs/shards.py` sees, whatever the session."""

from __future__ import annotations

EXPECTED = {
    "read": [0, 2, 1, 3],
    "ready": [[0, 0], [1, 2], [2, 0]],
    "engine": "spark",
    "doubled": [[0, 2], [4, 6], [8, 10]],
    "shared": [["zero"], ["two"], ["four"]],
    "error": ["no such thing", 1],
    "repartitioned": [[0, 1, 2], [3, 4, 5]],
    "zipped": [[0, 1], [2, 3], [4, 5]],
    "sorted": [5, 4, 3, 2, 1, 0],
    "groups": [["a", 6], ["b", 9]],
    "merged": [0, 1, 2, 3, 4, 5],
    "frame": [0, 1, 2, 3, 4, 5],
}
