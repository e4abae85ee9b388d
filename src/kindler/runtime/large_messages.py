"""Messages too large for a broker go through the store, as hidden datasets that the reader deletes.

Those that were never read are deleted after a day, by the next worker that starts.
"""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone

import numpy as np

from kindler.errors import FrameError
from kindler.frame import Frame
from kindler.runtime.messages import pack, unpack
from kindler.shelves.datasets.shelf import Datasets
from kindler.store import Address, Store

LARGEST_BYTES = 1 << 20  # of a message that goes through the broker
_FOLDER = ".runtime"
_REPLY = "-reply"
_KEPT = timedelta(days=1)


def reply_name(task_id: str) -> str:
    """What a reply to a task is called in the store."""
    return task_id + _REPLY


def whose(content: bytes) -> tuple[str, str]:
    """The task's id, and the queue of its client, of a message that is in the store; else empty texts."""
    try:
        frame = unpack(content)
        if frame.kind == "parcel":
            return LargeMessages._name(frame).removesuffix(_REPLY), str(frame.fields.get("reply_to", ""))
    except FrameError:
        pass
    return "", ""


class LargeMessages:
    """Packs and unpacks frames, large ones by way of the store.

    Args:
        url: The store's URL.
    """

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
        return pack(Frame("parcel", {"name": name, "reply_to": frame.fields.get("reply_to", "")}))

    def unpack(self, content: bytes) -> Frame:
        """The frame of a message.

        Raises:
            FrameError: It is not a frame.
            NotFoundError: Its content is no longer in the store.
        """
        frame = unpack(content)
        if frame.kind != "parcel":
            return frame
        inside = self._shelf().get(f"{_FOLDER}/{self._name(frame)}")
        if not isinstance(inside, np.ndarray) or inside.dtype != np.uint8:
            raise FrameError("a message in the store is not an array of bytes.")
        return unpack(inside.tobytes())

    def drop(self, content: bytes) -> None:
        """Delete the content of a message from the store, if it is there; after the last read."""
        frame = unpack(content)
        if frame.kind == "parcel":
            self._forget(f"{_FOLDER}/{self._name(frame)}")

    def tidy(self) -> None:
        """Delete messages that were never read, and the bytes of those that were."""
        limit = datetime.now(timezone.utc) - _KEPT
        shelf = self._shelf()
        for version in shelf.newest(f"{_FOLDER}/*", hidden=True):
            if version.created < limit:
                self._forget(version.name)
        shelf.store.sweep()

    def _forget(self, name: str) -> None:
        shelf = self._shelf()
        shelf.store.forget(Address(shelf.bucket, shelf.shelf, name))

    def close(self) -> None:
        """Close the store's connections."""
        with self._lock:
            if self._store is not None:
                self._store.close()

    def _shelf(self) -> Datasets:
        with self._lock:
            if self._store is None:
                self._store = Store.open(self._url)
            return Datasets(self._store, "default")

    @staticmethod
    def _name(frame: Frame) -> str:
        name = frame.fields.get("name")
        if not isinstance(name, str) or not name.replace("-", "").isalnum():
            raise FrameError("a message in the store has no valid name.")
        return name
