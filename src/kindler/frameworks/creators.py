"""Calls the user's functions and classes with as many arguments as their signatures take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from kindler.errors import ConfigError

_ROLES = frozenset({"config", "conf", "cfg", "params", "model", "optimizer", "batch_size"})
_CONFIG_WORDS = ("conf", "param", "arg", "opt", "setting", "dict", "mapping", "any")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def call(creator: Callable[..., Any], *args: Any) -> Any:
    """Call `creator` with as many of `args` as its signature takes.

    A parameter with a default takes its argument only if the default has the argument's type, or is None
    under a name common for creators: `def model(hidden=64)` does not receive the config.

    >>> call(lambda: 1, "config"), call(lambda config: config, "config")
    (1, 'config')
    """
    parameters = _parameters(creator)
    if parameters is None:
        return creator(*args)
    lacking = [p.name for p in parameters if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    places = [p for p in parameters if p.kind in _POSITIONAL]
    lacking += [p.name for p in places[len(args) :] if p.default is p.empty]
    if lacking:
        raise ConfigError(
            f"{title(creator)} needs {', '.join(map(repr, lacking))}, but is called with {len(args)}"
            f" argument{'s' if len(args) != 1 else ''}.\n"
            "Hint: bind the others with functools.partial, or read them from the config."
        )
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return creator(*args)
    is_class = isinstance(creator, type) and args and isinstance(args[0], Mapping)
    if is_class and places and not _may_be_config(places[0]):
        name, needed = title(creator)[:-2], places[0].name
        raise ConfigError(
            f"the class {name} needs {needed!r}, but a class is called with the config alone, a dict.\n"
            f"Hint: pass a function, lambda config: {name}({needed}=...), or an instance."
        )
    accepted: list[Any] = []
    for place, arg in zip(places, args, strict=False):
        if not _takes(place, arg):
            break
        accepted.append(arg)
    return creator(*accepted)


def positional(creator: Callable[..., Any]) -> int | None:
    """None if the signature is unknown."""
    parameters = _parameters(creator)
    if parameters is None:
        return None
    return sum(p.kind in _POSITIONAL and p.default is p.empty for p in parameters)


def makes(function: Callable[..., Any]) -> bool:
    """Whether a function makes a loss or metric (takes at most a config) rather than being one.

    Functions of two or of any number of arguments are the loss itself. With one required argument and others
    that have defaults, the name of the first decides.

    >>> makes(lambda config: 1), makes(lambda outputs, targets=None: 1), makes(lambda *tensors: 1)
    (True, False, False)
    """
    parameters = _parameters(function)
    if parameters is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    places = [p for p in parameters if p.kind in _POSITIONAL]
    required = sum(p.default is p.empty for p in places)
    return required == 0 or (required == 1 and (len(places) == 1 or places[0].name in _ROLES))


def keywords(function: Callable[..., Any]) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in _parameters(function) or () if p.kind in named]


def lacking(function: Callable[..., Any], *names: str) -> list[str]:
    """Required parameters besides these; if it has none of the names, besides its first."""
    parameters = [p for p in _parameters(function) or () if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    rest = [p for p in parameters if p.name not in names]
    if len(rest) == len(parameters):
        rest = parameters[1:]
    return [p.name for p in rest if p.default is p.empty]


def title(creator: Any) -> str:
    name = getattr(creator, "__qualname__", None) or type(creator).__qualname__
    return f"{name}()" if callable(creator) else str(name)


def _parameters(creator: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(creator).parameters.values())
    except (ValueError, TypeError):  # some builtins have none
        return None


def _may_be_config(place: inspect.Parameter) -> bool:
    if place.default is not place.empty or place.name in _ROLES:
        return True
    return any(word in f"{place.name} {place.annotation}".lower() for word in _CONFIG_WORDS)


def _takes(place: inspect.Parameter, arg: Any) -> bool:
    if place.default is place.empty:
        return True
    if place.default is None:
        return place.name in _ROLES
    return isinstance(arg, type(place.default))
