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
    """The states of Python's and numpy's generators, taken in microseconds where nothing was drawn."""

    def __init__(self) -> None:
        self._python: tuple[Any, bytes] = ((), b"")  # what tells states apart, and the pickled state
        self._numpy: tuple[bytes, bytes] = (b"", b"")
        self._address: int | None = None  # of numpy's Mersenne twister

    def take(self) -> tuple[bytes, bytes]:
        """For `put_back`."""
        return self._of_python(), self._of_numpy()

    @staticmethod
    def put_back(states: tuple[bytes, bytes]) -> None:
        random.setstate(pickle.loads(states[0]))
        np.random.set_state(pickle.loads(states[1]))

    def _of_python(self) -> bytes:
        state = random.getstate()
        words = state[1]
        mark = words[-1], words[1], words[_WORDS // 2], state[2]  # the first word is the same for all seeds
        if mark != self._python[0]:
            self._python = mark, pickle.dumps(state)
        return self._python[1]

    def _of_numpy(self) -> bytes:
        if self._address is None:
            random_of_numpy: Any = np.random  # whose annotations leave this out
            bits = random_of_numpy.get_bit_generator()
            self._address = bits.ctypes.state_address if isinstance(bits, np.random.MT19937) else 0
        words = ctypes.string_at(self._address, 4 * (_WORDS + 1)) if self._address else b""
        if not words or words != self._numpy[0]:
            state = np.random.get_state(legacy=True)
            # A normal number that is kept for the next call leaves without a trace in the words.
            keeps = bool(state[3]) if isinstance(state, tuple) else True
            self._numpy = b"" if keeps else words, pickle.dumps(state)
        return self._numpy[1]


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
