"""Randomness shared by ranks: the order of the data must be drawn alike on all. Imports no framework."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from types import TracebackType
from typing import Any

import numpy as np

_WORDS = 624  # of a Mersenne twister's state


def seed_all(*numbers: int) -> None:
    seed = seed_own(*numbers)
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if torch is not None:
        torch.manual_seed(seed)
    if tensorflow is not None and hasattr(tensorflow, "random"):
        tensorflow.random.set_seed(seed)


def seed_own(*numbers: int) -> int:
    """Seed Python and numpy, which no framework seeds."""
    words = [number % (1 << 32) for number in numbers]
    seed = int(np.random.SeedSequence(words).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    return seed


def own_states() -> list[Any]:
    """JSON-serializable."""
    kind, numbers, *rest = np.random.get_state(legacy=True)
    return [_lists(random.getstate()), [kind, np.asarray(numbers).tolist(), *rest]]


def restore_own(states: Any) -> None:
    (version, numbers, gauss), drawn = states
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(drawn))


def _lists(state: Any) -> Any:
    return [_lists(part) for part in state] if isinstance(state, tuple) else state


class OwnGenerators:
    """States of Python's, numpy's and other generators, taken in microseconds where nothing was drawn."""

    def __init__(self) -> None:
        self._python, self._numpy = _address_of_python(), _address_of_numpy()
        self._seen: tuple[bytes, ...] = ()
        self._taken = b""

    def take(self, *others: bytes) -> bytes:
        """For `put_back`; `others` are states of other generators."""
        # A normal number that is kept for the next call leaves without a trace in the words.
        kept = random._inst.gauss_next is not None  # type: ignore[attr-defined]
        seen = _words(self._python), _words(self._numpy), *others
        if kept or not all(seen) or seen != self._seen:
            of_numpy = np.random.get_state(legacy=True)
            kept = kept or not isinstance(of_numpy, tuple) or bool(of_numpy[3])
            self._seen = () if kept else seen
            self._taken = pickle.dumps((random.getstate(), of_numpy, others))
        return self._taken

    @staticmethod
    def put_back(taken: bytes) -> tuple[bytes, ...]:
        """Returns the states of the others."""
        of_python, of_numpy, others = pickle.loads(taken)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        return tuple(others)


def _words(address: int) -> bytes:
    """The words of a Mersenne twister, and how many of them are used; empty without an address."""
    return ctypes.string_at(address, 4 * (_WORDS + 1)) if address else b""


def _address_of_python() -> int:
    """Where CPython keeps them; 0 if not where it did from 3.10 to 3.14."""
    generator: Any = random._inst
    start = object.__basicsize__
    if start + 4 * (_WORDS + 1) > type(generator).__basicsize__:
        return 0
    _, (*words, used), _ = generator.getstate()
    is_there = np.frombuffer(_words(id(generator) + start), np.uint32).tolist() == [used, *words]
    return id(generator) + start if is_there else 0


def _address_of_numpy() -> int:
    random_of_numpy: Any = np.random  # whose annotations leave this out
    bits = random_of_numpy.get_bit_generator()
    return int(bits.ctypes.state_address) if isinstance(bits, np.random.MT19937) else 0


class Drawing:
    """A separate random stream: each `with` block continues where the last one on this object ended.

    TensorFlow keeps its state elsewhere and is left alone.
    """

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers
        self._inside: tuple[Any, ...] | None = None
        self._outside: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._outside = states()
        if self._inside is not None:
            restore(self._inside)
            return
        seed = seed_own(*self._numbers)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.default_generator.manual_seed(seed)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = states()
        restore(self._outside)


def states() -> tuple[Any, ...]:
    torch = getattr(sys.modules.get("torch"), "default_generator", None)  # it may be half imported
    return random.getstate(), np.random.get_state(), None if torch is None else torch.get_state()


def restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    if states[2] is not None:
        sys.modules["torch"].default_generator.set_state(states[2])
