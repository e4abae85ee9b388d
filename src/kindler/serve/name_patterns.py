"""Which names a client's pattern means, in a time that no pattern can make long.

The same globs as `kindler.store.names.matches`, which is a regular expression, and so may take for ever on a
pattern that somebody made for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from kindler.serve.http_errors import Problem
from kindler.shelves.shelf import Shelf
from kindler.store import Version
from kindler.store.names import LONGEST, literal_prefix

_MOST_STARS = 16
_Token: TypeAlias = tuple[str, Callable[[str], Any]]


def page_of(
    shelf: Shelf, pattern: str, sees: Callable[[str, str], bool], after: str = "", limit: int | None = None
) -> tuple[list[Version], str | None]:
    """The newest versions of the names that a pattern means.

    Args:
        shelf: The shelf.
        pattern: The glob.
        sees: Whether a name of a shelf is shown at all.
        after: Only names that come after this one.
        limit: At most so many; None for all.

    Returns:
        The versions by name, and the name after which the next page begins; None if there is none.

    Raises:
        Problem: 400: it is no pattern, or too long.
    """
    means = matching(pattern)
    prefix = f"{literal_prefix(pattern)}**"
    found: list[Version] = []
    while True:
        some = shelf.newest(prefix, after=after, limit=None if limit is None else limit + 1)
        found += [v for v in some if means(v.name) and sees(shelf.shelf, v.name)]
        if limit is None or len(some) <= limit:
            return (found, None) if limit is None or len(found) <= limit else _cut(found, limit)
        if len(found) > limit:
            return _cut(found, limit)
        after = some[-1].name


def _cut(found: list[Version], limit: int) -> tuple[list[Version], str | None]:
    return found[:limit], found[limit - 1].name


def matching(pattern: str) -> Callable[[str], bool]:
    """Whether a name is meant.

    >>> [matching(pattern)("a/b") for pattern in ("*", "**", "a/?", "**/b", "[ab]/b", "b")]
    [False, True, True, True, True, False]
    """
    if len(pattern) > LONGEST:
        raise Problem(400, f"the pattern has {len(pattern)} characters; at most {LONGEST} are allowed.")
    tokens = list(_tokens(pattern))
    stars = sum(kind != "one" for kind, _ in tokens)
    if stars > _MOST_STARS:
        raise Problem(400, f"the pattern has {stars} stars; at most {_MOST_STARS} are allowed.")
    return lambda name: _fits(tokens, name)


def _tokens(pattern: str) -> Iterator[_Token]:
    at = 0
    while at < len(pattern):
        char = pattern[at]
        end = pattern.find("]", at + 2) if char == "[" else -1
        if pattern.startswith("**/", at):
            yield "folders", lambda _: True
            at += 3
        elif pattern.startswith("**", at):
            yield "star", lambda _: True
            at += 2
        elif char == "*":
            yield "star", lambda c: c != "/"
            at += 1
        elif end > 0:
            yield "one", _one_of(pattern[at + 1 : end])
            at = end + 1
        else:
            yield "one", (lambda c: c != "/") if char == "?" else char.__eq__
            at += 1


def _one_of(inside: str) -> Callable[[str], Any]:
    text = inside.replace("\\", "\\\\").replace("[", "\\[")
    try:
        return re.compile(f"[{'^' + text[1:] if text[0] == '!' else text}]", re.DOTALL).fullmatch
    except re.error as exc:
        raise Problem(400, f"the pattern's [{inside[:40]}] is not a valid character set: {exc}.") from exc


def _fits(tokens: list[_Token], name: str) -> bool:
    """All places in the pattern at once, character by character: there is nothing to go back to."""

    def reach(places: set[int], at: int) -> None:
        places.add(at)
        while at < len(tokens) and tokens[at][0] != "one":  # stars and folders may be nothing
            at += 1
            places.add(at)

    places: set[int] = set()
    reach(places, 0)
    for char in name:
        after: set[int] = set()
        for at in places:
            if at == len(tokens):
                continue
            kind, takes = tokens[at]
            if kind == "folders":
                after.add(at)
                if char == "/":
                    reach(after, at + 1)
            elif takes(char):
                reach(after, at if kind == "star" else at + 1)
        places = after
    return len(tokens) in places
