"""Which names are valid, and which of them a pattern matches. Pure text: nothing is looked up here.

Names live in a catalog and never become paths, but they appear in URLs, archives and logs. So they are
printable, relative, and without the characters that selectors and patterns use.
"""

from __future__ import annotations

import re
from functools import lru_cache

from kindler.errors import ConfigError

LONGEST = 200
_RESERVED = frozenset('@^[]{}#*?:\\%"<>|')
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,99}")


def check_name(name: object, what: str = "name") -> str:
    """Return the name if it is valid.

    Raises:
        ConfigError: It is not; the message says why.

    >>> check_name("flowers/small")
    'flowers/small'
    """
    if not isinstance(name, str):
        raise ConfigError(f"{what}={name!r} is a {type(name).__name__}; a {what} must be a string.")
    problem = _name_problem(name)
    if problem:
        raise ConfigError(f"{what}={_short(name)} {problem}.")
    return name


def check_bucket(bucket: object) -> str:
    """A bucket's name: a plain word."""
    return _word(bucket, "bucket")


def check_tag(tag: object) -> str:
    """A tag: a plain word that does not mean a version by itself, as `v3` and `latest` do."""
    word = _word(tag, "tag")
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


def matches(pattern: str, name: str) -> bool:
    """Whether a glob matches the name: `*` and `?` within a part, `**` across parts, `[ab]` one character.

    >>> matches("a.*", "a.b"), matches("a.b", "axb"), matches("*", "a/b"), matches("**", "a/b")
    (True, False, False, True)
    """
    return _compiled(pattern).fullmatch(name) is not None


def literal_prefix(pattern: str) -> str:
    """The prefix that every matching name has."""
    found = re.match(r"[^*?\[]*", pattern)
    return found[0] if found else ""


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    expression, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if pattern.startswith("**", at):
            # "a/**/b" means "a/b" too.
            crosses = pattern.startswith("**/", at)
            expression, at = expression + ("(?:.*/)?" if crosses else ".*"), at + (3 if crosses else 2)
            continue
        end = pattern.find("]", at + 2) if char == "[" else -1
        if end > 0:
            inside = pattern[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            expression, at = expression + f"[{'^' + inside[1:] if inside[0] == '!' else inside}]", end + 1
            continue
        expression, at = expression + {"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char)), at + 1
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as exc:
        raise ConfigError(f"pattern={_short(pattern)} is not a valid glob: {exc}.") from exc


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


def _word(text: object, what: str) -> str:
    if not isinstance(text, str) or not _WORD.fullmatch(text):
        raise ConfigError(
            f"{what}={_short(str(text))}: a {what} begins with a letter, followed by at most 99 letters,"
            " digits, '.', '-' or '_'."
        )
    return text


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
