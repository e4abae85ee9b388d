"""Selectors of versions: `name`, `name@3`, `name@prod`, `name^`, `name@prod^^`. Nothing is looked up."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kindler.errors import ConfigError
from kindler.store.names import check_name, check_tag

_FORM = re.compile(r"(?P<name>[^@^]*)(?:@(?P<ref>[^@^]*))?(?P<back>\^*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Selector:
    """A name, and one of its versions.

    Attributes:
        name: The name.
        ref: A version's number, a tag, or None for the newest.
        back: How many versions before that one.
    """

    name: str
    ref: int | str | None = None
    back: int = 0

    @property
    def is_bare(self) -> bool:
        """Whether it is a name without a version."""
        return self.ref is None and not self.back

    def __str__(self) -> str:
        return self.name + ("" if self.ref is None else f"@{self.ref}") + "^" * self.back


def parse(text: object, version: int | str | None = None) -> Selector:
    """Read a selector.

    Args:
        text: What the user wrote.
        version: A number or a tag that was passed separately.

    Raises:
        ConfigError: It is invalid, or names two versions.

    >>> parse("net@prod^")
    Selector(name='net', ref='prod', back=1)
    """
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        check_name(text)  # raises if it is not a string
        raise ConfigError(
            f"{text!r} is not a selector.\nHint: use name, name@3, name@tag, name^ (the one"
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
