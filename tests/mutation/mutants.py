"""Small errors to make in a module: each mutant is its text with one change.

`<` becomes `<=` or `>=`, `and` becomes `or`, a number one more or one less, a condition its opposite, what is
returned None, and a statement nothing. Messages, docstrings, annotations, decorators, logs and asserts stay
as they are: they decide nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutation.targets import Target

ROOT = Path(__file__).parents[2]

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SHOWS = {"__repr__", "__str__", "_repr_html_"}
_PLAIN = (ast.stmt, ast.Constant, ast.Name)  # whose replacements need no parentheses
_NO_CODE = {"annotation", "returns", "decorator_list", "bases"}


@dataclass(frozen=True)
class Mutant:
    place: str  # such as `row_order.py:54`
    change: str  # such as `steps: if batch_size < 1: -> if (batch_size <= 1):`
    source: str


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()) | ast.keyword(arg="strict"):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="_log" | "warnings")))):
            return True
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
        case ast.BinOp(left=ast.Constant(), op=ast.LShift(), right=ast.Constant()):
            return True  # a size, such as 1 << 20
        case ast.FunctionDef(name=name):
            return name in _SHOWS
    return False


def _replacements(node: ast.AST, *, is_test: bool) -> Iterator[str]:
    """Texts that may stand in the place of a node; `is_test` is for a condition."""

    def other(**fields: Any) -> str:
        changed = copy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        return ast.unparse(changed)

    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for kind in _COMPARISONS[type(op)]:
                    yield other(ops=[*ops[:i], kind(), *ops[i + 1 :]])
        case ast.BoolOp(op=op):
            yield other(op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _OPERATORS:
            yield other(op=_OPERATORS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield ast.unparse(operand)
        case ast.Constant(value=bool(value)):
            yield repr(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (repr(value + 1), repr(value - 1))
        case ast.Name(id=name, ctx=ast.Load()) if name in _OPPOSITES:
            yield _OPPOSITES[name]
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return None"
        case ast.Expr() | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break() | ast.AugAssign():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "pass"
    if is_test and not isinstance(node, ast.Compare | ast.UnaryOp | ast.Constant):
        yield f"not ({ast.unparse(node)})"


def _nodes(node: ast.AST, within: str = "") -> Iterator[tuple[str, ast.AST, bool]]:
    """All nodes that may change: the function that each is in, and whether it is a condition."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if field in _NO_CODE or not isinstance(child, ast.AST) or _is_left_alone(child):
                continue
            yield within, child, field in ("test", "ifs")
            name = getattr(child, "name", None) if isinstance(child, ast.stmt) else None
            yield from _nodes(child, f"{within}.{name}".lstrip(".") if name else within)


def mutants(target: Target) -> Iterator[Mutant]:
    path = ROOT / target.path
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for within, node, is_test in _nodes(ast.parse(text)):
        if target.only and not any(f"{within}.".startswith(f"{name}.") for name in target.only):
            continue
        for new in _replacements(node, is_test=is_test):
            at: Any = node  # an expression or a statement: these have places
            first, end = starts[at.lineno - 1], starts[at.end_lineno]
            before = text[first : first + at.col_offset]
            after = text[starts[at.end_lineno - 1] + at.end_col_offset : end]
            patch = before + (new if isinstance(node, _PLAIN) else f"({new})").encode() + after
            old, changed = (" ".join(lines.decode().split()) for lines in (text[first:end], patch))
            source = (text[:first] + patch + text[end:]).decode()
            yield Mutant(f"{path.name}:{at.lineno}", f"{within}: {old} -> {changed}", source)
