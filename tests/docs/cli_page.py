"""Writes `docs/cli.md` from the parser of the command line: `python -m tests.docs.cli_page`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kindler.cli import build_parser

__all__ = ["PAGE", "text"]

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
_HEAD = """\
<!-- Made by `python -m tests.docs.cli_page` from the parser of src/kindler/cli: change that instead. -->

# Command line reference

All commands and options of `kindler`. `python -m kindler` is the same command. The
[guide](guides/command-line.md) shows them at work; defaults of the server's limits are in
[Serve](guides/serve.md#limits).

Errors are printed on standard error. The exit status is 0 on success, 1 after an error, 2 for invalid
arguments, and 130 after Ctrl-C.
"""
_VARIABLES = """
## Environment variables

| variable | default for |
|---|---|
| `KINDLER_STORE` | `--store` |
| `KINDLER_BROKER` | `--broker` |
| `KINDLER_KEY` | `--key` |
"""


def text() -> str:
    """The page."""
    return "\n".join([_HEAD, *_sections(build_parser(), level=2)]) + _VARIABLES


def _sections(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                yield from _command(command, helps[name], level)


def _command(parser: argparse.ArgumentParser, what: str, level: int) -> Iterator[str]:
    yield f"{'#' * level} `{parser.prog}`\n"
    yield f"{_sentence(what)}\n"
    if any(isinstance(action, argparse._SubParsersAction) for action in parser._actions):
        yield from _sections(parser, level + 1)
        return
    shown = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    arguments = [action for action in shown if not action.option_strings]
    names = [_argument(action) for action in arguments]
    usage = " ".join([parser.prog, *(["[OPTIONS]"] if len(arguments) < len(shown) else []), *names])
    yield f"```console\n$ {usage}\n```\n"
    if shown:
        yield "| argument or option | meaning |\n|---|---|"
        for action in [*arguments, *(one for one in shown if one.option_strings)]:
            yield f"| {_cell(_name(action))} | {_cell(_meaning(parser, action))} |"
        yield ""


def _argument(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name)


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{_argument(action)}`"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    if action.nargs == 0:
        return names
    value = action.metavar or (_choices(action) if action.choices else action.dest.upper())
    return f"{names} `{value}`"


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    facts: dict[str, Any] = {**vars(action), "prog": parser.prog}
    said = (action.help or "") % facts
    parts = [said]
    if action.required and action.option_strings:
        parts.append("required")
    if action.choices and action.metavar:
        parts.append(f"one of {', '.join(map(str, action.choices))}")
    if "default" not in said and action.default not in (None, False, "", [], argparse.SUPPRESS):
        parts.append(f"default: {action.default}")
    return _sentence("; ".join(filter(None, parts)))


def _choices(action: argparse.Action) -> str:
    return f"{{{','.join(map(str, action.choices or ()))}}}"


def _sentence(words: str) -> str:
    first = words[:1] if "://" in words.partition(" ")[0] else words[:1].upper()
    return f"{first}{words[1:]}." if words else ""


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("*", "\\*").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(text())
