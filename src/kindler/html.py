"""Small tables for notebooks: plain HTML that every front end shows, with all text escaped."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_ROWS = 30
_MOST_COLUMNS = 24
_MOST_TEXT = 120


def shown(value: Any) -> str:
    """A value as a short text.

    >>> shown(0.123456), shown(1234567), shown([1, 2, 3]), shown(None), shown(True)
    ('0.1235', '1,234,567', '[3 values]', '', 'yes')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={shown(part)}" for key, part in value.items())[:_MOST_TEXT]
    if isinstance(value, list | tuple):
        return f"[{len(value)} values]"
    text = str(value)
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"


def table(rows: Sequence[Mapping[str, Any]], caption: str = "", columns: Sequence[str] = ()) -> str:
    """A table with a row per mapping; of many, the first and the last. Rows may lack columns."""
    names = list(columns) or list(dict.fromkeys(name for row in rows for name in row))
    names = names[:_MOST_COLUMNS]
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in names)
    half = _MOST_ROWS // 2
    cut = len(rows) > _MOST_ROWS
    lines = [_line(row, names) for row in (rows[:half] if cut else rows)]
    if cut:
        lines.append(f'<tr><td colspan="{len(names)}">… {len(rows) - 2 * half:,} more …</td></tr>')
        lines += [_line(row, names) for row in rows[-half:]]
    above = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def card(title: str, facts: Mapping[str, Any]) -> str:
    lines = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(shown(value))}</td></tr>"
        for name, value in facts.items()
        if value is not None and value != ""
    )
    return f"<table><caption>{html.escape(title)}</caption><tbody>{lines}</tbody></table>"


def _line(row: Mapping[str, Any], names: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(shown(row.get(name)))}</td>" for name in names) + "</tr>"
