"""Messages too large for a broker go through the store, as hidden datasets that their reader deletes.

The broker then carries a frame of kind "parcel" that names the dataset. Those that nobody deleted are deleted
after a day, by any worker.
"""

from __future__ import annotations

import logging
import threading
from datetime import datetime, timedelta, timezone

import numpy as np

from kindler.errors import FrameError, StoreError
from kindler.frame import Frame
from kindler.runtime.messages import pack, unpack
from kindler.shelves.datasets import Datasets
from kindler.store import Address, Store

LARGEST_BYTES = 1 << 20  # of a message that goes through the broker

_log = logging.getLogger("kindler.runtime")
_FOLDER = ".runtime"
_KEPT = timedelta(days=1)


class LargeMessages:
    """Packs and unpacks frames, large ones by way of the store with this URL. Thread-safe."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._store: Store | None = None
        self._lock = threading.Lock()

    def pack(self, frame: Frame, name: str) -> bytes:
        """A frame as a message; `name` identifies it in the store."""
        content = pack(frame)
        if len(content) <= LARGEST_BYTES:
            return content
        self._shelf().put(np.frombuffer(content, np.uint8), f"{_FOLDER}/{name}", mode="replace")
        return pack(Frame("parcel", {"name": name}))

    def unpack(self, content: bytes) -> Frame:
        """The frame of a message.

        Raises:
            FrameError: It is not a frame.
            NotFoundError: Its content is no longer in the store.
        """
        frame = unpack(content)
        if frame.kind != "parcel":
            return frame
        inside = self._shelf().get(_stored_name(frame))
        if not isinstance(inside, np.ndarray) or inside.dtype != np.uint8:
            raise FrameError("a message in the store is not an array of bytes.")
        return unpack(np.ascontiguousarray(inside).reshape(-1).data)

    def drop(self, content: bytes) -> None:
        """Delete the content of a message from the store, if it is there; after the last read."""
        try:
            frame = unpack(content)
            if frame.kind == "parcel":
                self._forget(_stored_name(frame))
        except FrameError:
            pass  # not one of ours
        except (StoreError, OSError) as exc:
            _log.warning("could not delete a large message, which is tried again after a day: %s", exc)

    def drop_old(self) -> None:
        """Delete messages that were not deleted by a reader."""
        limit = datetime.now(timezone.utc) - _KEPT
        try:
            for version in self._shelf().newest(f"{_FOLDER}/*", hidden=True):
                if version.created < limit:
                    self._forget(version.name)
        except (StoreError, OSError) as exc:
            _log.warning("could not delete large messages that were never read: %s", exc)

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()

    def _forget(self, name: str) -> None:
        shelf = self._shelf()
        shelf.store.forget(Address(shelf.bucket, shelf.shelf, name))

    def _shelf(self) -> Datasets:
        with self._lock:
            if self._store is None:
                self._store = Store.open(self._url)
            return Datasets(self._store, "default")


def _stored_name(frame: Frame) -> str:
    name = frame.fields.get("name")
    if not isinstance(name, str) or not name.replace("-", "").isalnum():
        raise FrameError("a message in the store has no valid name.")
    return f"{_FOLDER}/{name}"
