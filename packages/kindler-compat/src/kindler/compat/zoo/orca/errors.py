"""Errors as Orca's programs expect them: a `RuntimeError` for whatever is wrong with an argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kindler.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


class InvalidInput(ConfigError, RuntimeError):
    """An argument that cannot work: a `RuntimeError` as in BigDL 2, a `ValueError` as in Analytics Zoo."""


def as_orca(function: Function) -> Function:
    """Let a function raise `InvalidInput` where it would raise a plain `ConfigError`."""

    @functools.wraps(function)
    def converted(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ConfigError as exc:
            if isinstance(exc, RuntimeError):
                raise
            raise InvalidInput(*exc.args) from exc

    return cast("Function", converted)


def refuse_given(function: str, **arguments: Any) -> None:
    """Raise `InvalidInput` for arguments that would change a result and are not supported."""
    given = {name: value for name, value in arguments.items() if value is not None}
    if given:
        several = ", ".join(f"{name}={value!r:.40}" for name, value in given.items())
        raise InvalidInput(f"{function}: not supported: {several}.\nHint: leave it out.")
