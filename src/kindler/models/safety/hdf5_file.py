"""Whether an HDF5 file keeps to itself: its links and datasets can name other files that HDF5 would read."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, BinaryIO

# The filters that come with HDF5 and h5py; any other is a library that HDF5 looks for and loads.
_FILTERS = frozenset({1, 2, 3, 4, 5, 6, 32000})
# What can at most be packed into a byte, and how large a dataset may be that is not stored at all.
_RATIO, _UNSTORED_BYTES = 1100, 1 << 20


def dangers(file: BinaryIO) -> list[str]:
    """What in the file leads out of it, in words; empty if nothing does."""
    h5py: Any = importlib.import_module("h5py")
    with h5py.File(file, "r") as opened:
        return list(dict.fromkeys(_group(h5py, opened)))


def _group(h5py: Any, root: Any) -> Iterator[str]:
    waiting, seen = [root], set()
    while waiting:
        group = waiting.pop()
        for name in group:
            if not _is_own(h5py, group, name):
                yield f"the weights {name!r}, which are a link"
                continue
            found = group[name]
            place = h5py.h5o.get_info(found.id).addr
            if place in seen:
                continue
            seen.add(place)
            if isinstance(found, h5py.Group):
                waiting.append(found)
            elif isinstance(found, h5py.Dataset):
                yield from _dataset(name, found)


def _is_own(h5py: Any, group: Any, name: str) -> bool:
    try:
        return isinstance(group.get(name, getlink=True), h5py.HardLink)
    except TypeError:  # of h5py: a link of a kind that somebody has defined
        return False


def _dataset(name: str, dataset: Any) -> Iterator[str]:
    how = dataset.id.get_create_plist()
    if dataset.external or dataset.is_virtual:
        yield f"the weights {name!r}, which lie in other files"
    elif any(how.get_filter(i)[0] not in _FILTERS for i in range(how.get_nfilters())):
        yield f"the weights {name!r}, which are packed in an unknown way"
    elif dataset.nbytes > max(_UNSTORED_BYTES, _RATIO * dataset.id.get_storage_size()):
        yield f"the weights {name!r}, which are larger than what is stored of them"
