"""Which names are valid, which version a selector names, and which names a glob matches. Pure text.

Names live in a catalog and never become paths, but they appear in URLs, archives and logs. So they are
printable, relative, and without the characters that selectors and patterns use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kindler.errors import ConfigError

LONGEST = 200
MOST_STARS = 16  # of a glob that others give
_REMEMBERED = 1000  # steps of each glob
_RESERVED = frozenset('@^[]{}#*?:\\%"<>|')
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,99}")
_SELECTOR = re.compile(r"(?P<name>[^@^]*)(?:@(?P<ref>[^@^]*))?(?P<back>\^*)", re.DOTALL)


def check_name(name: object) -> str:
    """Return the name if it is valid."""
    if not isinstance(name, str):
        raise ConfigError(f"name={name!r} is a {type(name).__name__}; a name must be a string.")
    if problem := _name_problem(name):
        raise ConfigError(f"name={_short(name)} {problem}.")
    return name


def check_bucket(bucket: object, what: str = "bucket") -> str:
    """Return the name of a bucket if it is a plain word."""
    if not isinstance(bucket, str) or not _WORD.fullmatch(bucket):
        raise ConfigError(
            f"{what}={_short(str(bucket))}: a {what} begins with a letter, followed by at most 99 letters,"
            " digits, '.', '-' or '_'."
        )
    return bucket


def check_tag(tag: object) -> str:
    """Return a plain word that does not mean a version by itself, as `v3` and `latest` do."""
    word = check_bucket(tag, "tag")
    if word == "latest" or re.fullmatch(r"v\d+", word):
        meant = "the newest version" if word == "latest" else f"version {word[1:]}"
        raise ConfigError(
            f"tag={word!r} cannot be a tag: name@{word} always means {meant}.\nHint: tag='release-1'."
        )
    return word


def check_path(path: object) -> str:
    """Return the relative path of a file in a version if it stays within its folder.

    Paths also come from foreign archives and catalogs, so they are checked again whenever they are used.
    """
    if not isinstance(path, str) or not path or len(path) > 1000:
        raise ConfigError(f"{_short(str(path))} is not a valid path of a stored file.")
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or not path.isprintable():
        raise ConfigError(
            f"{_short(path)} is not a valid path of a stored file: it must be relative,"
            " printable, and without '..'."
        )
    return path


def is_hidden(name: str) -> bool:
    """Whether listings skip the name: a part of it begins with a dot or an underscore."""
    return any(part[0] in "._" for part in name.split("/"))


@dataclass(frozen=True, slots=True)
class Selector:
    """A name, and one of its versions."""

    name: str
    ref: int | str | None = None  # a version's number, a tag, or None for the newest
    back: int = 0  # how many versions before that one

    @property
    def is_bare(self) -> bool:
        """Whether it is a name without a version."""
        return self.ref is None and not self.back

    def __str__(self) -> str:
        return self.name + ("" if self.ref is None else f"@{self.ref}") + "^" * self.back


def parse_selector(text: object, version: int | str | None = None) -> Selector:
    """Read `name`, `name@3`, `name@prod`, `name^` or `name@prod^^`; `version` was passed beside it.

    >>> parse_selector("net@prod^")
    Selector(name='net', ref='prod', back=1)
    """
    match = _SELECTOR.fullmatch(text if isinstance(text, str) else check_name(text))
    if match is None:
        raise ConfigError(
            f"{_short(str(text))} is not a selector.\nHint: use name, name@3, name@tag, name^ (the one"
            " before), or name@tag^."
        )
    name = check_name(match["name"])
    ref = None if match["ref"] is None else _ref(match["ref"])
    if version is not None:
        if ref is not None:
            raise ConfigError(f"{text!r} and version={version!r} both name a version.")
        if not isinstance(version, int | str) or isinstance(version, bool):
            raise ConfigError(
                f"version={version!r} is a {type(version).__name__}; a version is a number or a tag."
            )
        ref = _ref(str(version))
    return Selector(name, ref, len(match["back"]))


def _ref(text: str) -> int | str | None:
    if text == "latest":
        return None
    digits = text[1:] if re.fullmatch(r"v\d+", text) else text
    if re.fullmatch(r"\d{1,18}", digits, re.ASCII):
        return int(digits)
    return check_tag(text)


def check_glob(pattern: str) -> str:
    """Return the glob if `matches` takes little time for it, whoever made it."""
    if len(pattern) > LONGEST or pattern.count("*") > MOST_STARS:
        raise ConfigError(
            f"{_short(pattern)} has {len(pattern)} characters and {pattern.count('*')} stars; a glob has at"
            f" most {LONGEST} characters and {MOST_STARS} stars."
        )
    _compiled(pattern)
    return pattern


def matches(pattern: str, name: str) -> bool:
    """Whether a glob matches the name: `*` and `?` within a part, `**` across parts, `[ab]` one character.

    The time is proportional to the length of the name, whatever the pattern: it may come from a client.

    >>> matches("a.*", "a.b"), matches("a.b", "axb"), matches("*", "a/b"), matches("**", "a/b")
    (True, False, False, True)
    >>> [matches(pattern, "a/b") for pattern in ("a/?", "**/b", "[ab]/b", "[!b]/b", "a/**/b", "b")]
    [True, True, True, True, True, False]
    """
    return _compiled(pattern)(name)


def literal_prefix(pattern: str) -> str:
    """The prefix that every matching name has."""
    return re.split(r"[*?\[]", pattern, maxsplit=1)[0]


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> Callable[[str], bool]:
    """All positions in the pattern at once, one bit each, character by character; nothing to go back to."""
    if pattern == "**":
        return lambda _: True
    tokens = list(_tokens(pattern))
    single, stars, folders = (
        sum(1 << i for i, (token, _) in enumerate(tokens) if token == wanted)
        for wanted in ("one", "star", "folders")
    )
    known: dict[tuple[int, str], int] = {}

    def skip(positions: int) -> int:  # stars and folders may stand for nothing
        while (more := positions | (positions & (stars | folders)) << 1) != positions:
            positions = more
        return positions

    def step(positions: int, char: str) -> int:
        taken = positions & sum(1 << i for i, (_, accepts) in enumerate(tokens) if accepts(char))
        within = positions & folders  # stays there until a slash
        following = skip((taken & single) << 1 | taken & stars | (within << 1 if char == "/" else 0)) | within
        if len(known) < _REMEMBERED:
            known[positions, char] = following
        return following

    def fits(name: str) -> bool:
        positions = skip(1)
        for char in name:
            following = known.get((positions, char))
            positions = step(positions, char) if following is None else following
        return bool(positions >> len(tokens))

    return fits


def _tokens(pattern: str) -> Iterator[tuple[str, Callable[[str], Any]]]:
    at = 0
    while at < len(pattern):
        char = pattern[at]
        end = pattern.find("]", at + 2) if char == "[" else -1
        if pattern.startswith("**/", at):  # "a/**/b" means "a/b" too
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
        raise ConfigError(f"[{_short(inside)}] is not a valid character set of a glob: {exc}.") from exc


def _name_problem(name: str) -> str:
    if not name:
        return "is empty"
    if len(name) > LONGEST:
        return f"has {len(name)} characters; at most {LONGEST} are allowed"
    if not name.isprintable():
        return "has characters that cannot be printed"
    reserved = sorted(_RESERVED & set(name))
    if reserved:
        return f"has {' '.join(reserved)}, which are not allowed in names"
    if name.startswith("/"):
        return "is absolute; names are relative"
    if any(part in ("", ".", "..") or part != part.strip() for part in name.split("/")):
        return "has a part that is empty, '.', '..', or begins or ends with a space"
    return ""


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
