"""Canaries and shadows: which version answers a request of a tag, and which ones are called beside.

A canary that is not in memory yet is loaded beside the requests, which the tag's own version answers
meanwhile; one that cannot be loaded never answers any. A shadow call begins when its request is answered, and
can neither delay nor fail it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor

import numpy as np

from kindler.errors import KindlerError, NotFoundError
from kindler.models.signature import Array, Arrays
from kindler.serve.auth import bare_name
from kindler.serve.http_errors import Problem
from kindler.serve.model_registry import LoadedModel, ModelRegistry, Name, shown_name
from kindler.serve.stats import Stats
from kindler.store.splits import Split, Splits

SESSION = "x-session-id"  # requests with the same one go to the same version
_MAX_SHADOWS = 32  # at a time; further ones are dropped
_TOLERANCE = 1e-3
_log = logging.getLogger("kindler.serve")

Call = Callable[[LoadedModel], Awaitable[Arrays]]


class Traffic:
    def __init__(
        self,
        splits: Splits,
        models: ModelRegistry,
        stats: Stats,
        executor: Executor,
        refresh_s: float,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._splits = splits
        self._models = models
        self._stats = stats
        self._executor = executor
        self._refresh_s = refresh_s
        self._chance = chance
        self._known: dict[tuple[str, str, str], Split] = {}
        self._next_read = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading: set[Name] = set()
        self._shadows = 0

    async def read(self) -> None:
        """Read the splits now."""
        self._next_read = math.inf
        try:
            splits = await asyncio.get_running_loop().run_in_executor(self._executor, self._splits.list)
            self._known = {(split.bucket, split.name, split.tag): split for split in splits}
        except KindlerError as exc:
            _log.warning("cannot read the splits: %s", exc)
        finally:
            self._next_read = time.monotonic() + self._refresh_s

    def split_of(self, name: Name) -> Split | None:
        """The split of the tag that a request names, if it has one."""
        if time.monotonic() > self._next_read:
            self._next_read = math.inf  # until it was read
            self._start(self.read())
        if not self._known:
            return None
        bucket, text, version = name
        tag = version or text.partition("@")[2]
        return self._known.get((bucket, bare_name(text), tag)) if tag else None

    def canary(self, split: Split, headers: Mapping[str, str]) -> LoadedModel | None:
        """The canary that answers this request; None if the tag's own version does."""
        if not split.canary:
            return None
        session = headers.get(SESSION)
        at = self._chance() if session is None else _position(split, session)
        for number, share in split.canary.items():
            at -= share
            if at < 0:
                name = (split.bucket, split.name, str(number))
                model = self._models.at_hand(name)
                if model is None and name not in self._loading:
                    self._loading.add(name)
                    self._start(self._load(name))
                return model
        return None

    def shadow(self, split: Split, outputs: Arrays, call: Call) -> list[int]:
        """Call the shadows of a split beside, and compare what they answer; returns which are called."""
        called = []
        for number, share in split.shadow.items():
            if share < 1 and self._chance() >= share:
                continue
            if self._shadows >= _MAX_SHADOWS:
                name = split.name if split.bucket == "default" else f"{split.bucket}:{split.name}"
                self._stats.version(name, number).shadows["dropped"] += 1
                continue
            self._shadows += 1
            self._start(self._call_shadow((split.bucket, split.name, str(number)), outputs, call))
            called.append(number)
        return called

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def _call_shadow(self, name: Name, outputs: Arrays, call: Call) -> None:
        stats = None
        try:
            model = await self._models.find(name)
            stats = self._stats.version(shown_name(model.version), model.version.number)
            stats.shadows["same" if same_outputs(outputs, await call(model)) else "different"] += 1
        except Exception as exc:  # noqa: BLE001 - its request was answered; nobody waits for this
            if stats is None:
                _log.warning("the shadow %s@%s is not called: %s", name[1], name[2], exc)
            else:
                stats.shadows["failed"] += 1
        finally:
            self._shadows -= 1

    async def _load(self, name: Name) -> None:
        try:
            await self._models.find(name)
        except NotFoundError:
            pass  # it was dropped; the tag's own version answers
        except (KindlerError, Problem) as exc:
            _log.warning("the canary %s@%s does not answer: %s", name[1], name[2], exc)
        finally:
            self._loading.discard(name)

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def same_outputs(outputs: Arrays, others: Arrays) -> bool:
    """Whether two answers are the same, numbers within 0.001 of their size."""

    def same(array: Array, other: Array) -> bool:
        if array.shape == other.shape and array.dtype.kind in "fc" and other.dtype.kind in "fciub":
            return np.allclose(array, other, _TOLERANCE, _TOLERANCE, equal_nan=True)
        return np.array_equal(array, other)

    return outputs.keys() == others.keys() and all(same(outputs[name], others[name]) for name in outputs)


def _position(split: Split, session: str) -> float:
    """Where a session stands between 0 and 1, always the same for one tag."""
    text = f"{split.bucket}/{split.name}@{split.tag}/{session}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
