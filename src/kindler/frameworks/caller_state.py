"""Restores the caller's process-wide state (random generators, threads, defaults) after Kindler changes it.

Only around short moments, one thread at a time: during `fit`, other threads' draws are their own.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np

from kindler.errors import did_you_mean
from kindler.frameworks.rng import restore, states
from kindler.tracebacks import without_kindler_frames

P = ParamSpec("P")
T = TypeVar("T")

_one_at_a_time = threading.RLock()
_TORCH_SEED = 67280421310721  # what torch's generators begin with in a new process


def leaves_no_trace(function: Callable[P, T]) -> Callable[P, T]:
    """For functions that take little time: other threads wait."""

    bare_function = bare_interrupts(function)

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        with untouched():
            return bare_function(*args, **kwargs)

    return guarded


def bare_interrupts(function: Callable[P, T]) -> Callable[P, T]:
    """Show only the caller's frames for an interrupt, and name the nearest keyword for a misspelt one."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            raise without_kindler_frames(interrupt) from None
        except TypeError as error:
            near = _nearest_keyword(error, function)
            if near is None:
                raise
            raise TypeError(near) from None

    return guarded


def _nearest_keyword(error: TypeError, function: Callable[..., Any]) -> str | None:
    text = str(error)
    wrong = re.fullmatch(r".+ got an unexpected keyword argument '(\w+)'", text)
    in_the_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
    if wrong is None or not in_the_call:
        return None
    near = did_you_mean(wrong[1], inspect.signature(function).parameters)
    return f"{text}.{near}" if near else None


@contextmanager
def untouched() -> Iterator[None]:
    """A framework first imported within the block is put into its freshly imported state."""
    with _one_at_a_time:
        # Each notes the state up to its `yield`, and restores it after that.
        kept = [_random(), _torch(), _tensorflow(), _keras(), _keras_2()]
        for each in kept:
            next(each)
        try:
            yield
        finally:
            for each in kept:
                next(each, None)


def _random() -> Iterator[None]:
    before = states()
    yield
    restore(before)


def _torch() -> Iterator[None]:
    torch = _loaded("torch", "default_generator")
    if torch is None:
        yield
        if (torch := _loaded("torch", "default_generator")) is not None:
            torch.default_generator.manual_seed(_TORCH_SEED)
        return
    threads, dtype, gradients = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    on_gpu = torch.cuda.is_initialized()
    gpus = (torch.cuda.get_rng_state_all(), torch.cuda.current_device()) if on_gpu else None
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(gradients)
    if gpus is not None:
        torch.cuda.set_rng_state_all(gpus[0])
        torch.cuda.set_device(gpus[1])


def _tensorflow() -> Iterator[None]:
    before = _eager_context()
    seed = getattr(before, "_seed", None)
    drawn = before._rng.getstate() if hasattr(before, "_rng") else None
    yield
    context = _eager_context()
    if context is None or getattr(context, "_seed", None) == seed is None:
        return
    context._seed = seed
    if drawn is not None:
        context._rng.setstate(drawn)


def _eager_context() -> Any:
    module = _loaded("tensorflow.python.eager.context", "context")
    return None if module is None else module.context()


def _keras() -> Iterator[None]:
    name = "keras.src.backend.common.global_state"
    seed = generator = drawn = None
    if (module := _loaded(name, "get_global_attribute")) is not None:
        seed = module.get_global_attribute("global_random_seed")
        generator = module.get_global_attribute("global_seed_generator")
    if generator is not None:
        drawn = np.array(sys.modules["keras"].ops.convert_to_numpy(generator.state.value))
    yield
    if (module := _loaded(name, "set_global_attribute")) is not None:
        module.set_global_attribute("global_random_seed", seed)
        module.set_global_attribute("global_seed_generator", generator)
    if generator is not None:
        generator.state.assign(drawn)


def _keras_2() -> Iterator[None]:
    before = getattr(_seeds_of_keras_2(), "generator", None)
    drawn = None if before is None else before.getstate()
    yield
    holder = _seeds_of_keras_2()
    if before is not None:
        holder.generator = before
        before.setstate(drawn)
    elif hasattr(holder, "generator"):
        del holder.generator


def _seeds_of_keras_2() -> Any:
    module = _loaded("tf_keras.src.backend", "_SEED_GENERATOR")
    return None if module is None else module._SEED_GENERATOR


def _loaded(name: str, attribute: str) -> Any:
    """The module if it is imported far enough to have this attribute."""
    module = sys.modules.get(name)
    return module if hasattr(module, attribute) else None
