"""Classes that are rows of tables: BigDL's names of arguments, their defaults, and what a class computes.

>>> table = {"Power(power, scale=1.0)": lambda o, x: (o.scale * x) ** o.power}
>>> Power = classes(__name__, Configured, table, "compute")["Power"]
>>> Power(2).scale, Power(2, scale=3), Power(2).compute(4)
(1.0, Power(power=2, scale=3.0), 16.0)
"""

from __future__ import annotations

import sys
from ast import literal_eval
from collections.abc import Mapping
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, ClassVar, cast

INTMAX, INTMIN, DOUBLEMAX = 2**31 - 1, -(2**31), sys.float_info.max
_CONSTANTS = {"INTMAX": INTMAX, "INTMIN": INTMIN, "DOUBLEMAX": DOUBLEMAX}


def arguments(*texts: str) -> Signature:
    """Arguments as in Python: "kw, dw=1, format='NCHW'"; `bigdl_type`, the last of all, has no effect."""
    parameters: dict[str, Parameter] = {}
    for part in [part for text in (*texts, "bigdl_type='float'") for part in text.split(", ") if part]:
        name, _, default = part.partition("=")
        value = _CONSTANTS[default] if default in _CONSTANTS else literal_eval(default or "None")
        kept = Parameter.empty if not default else value
        parameters.setdefault(name, Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=kept))
    return Signature(list(parameters.values()))


class Configured:
    """Keeps its arguments as attributes, then calls `setup`.

    Numbers whose default is a float become floats. Where the class has something of that name already, such
    as a method, the attribute begins with an underscore.
    """

    takes: ClassVar[Signature]

    def __init_subclass__(cls, takes: Signature | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if takes is not None:
            cls.takes = cls.__signature__ = takes  # type: ignore[attr-defined]
        elif "__init__" in vars(cls):  # of a program's own: what `help` and `inspect.signature` show
            own = list(signature(vars(cls)["__init__"]).parameters.values())[1:]
            cls.__signature__ = Signature(own)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        vars(self).update(self.attributes(args, kwargs))
        self.setup()

    def setup(self) -> None:
        """Finish and check what the arguments say."""

    @classmethod
    def attributes(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Attributes by name, of the arguments of a constructor."""
        try:
            bound = cls.takes.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{cls.__name__}{cls.takes}: {exc}") from None
        bound.apply_defaults()
        return {
            f"_{name}" if hasattr(cls, name) else name: float(value)
            if isinstance(cls.takes.parameters[name].default, float)
            else value
            for name, value in bound.arguments.items()
        }

    def extra_repr(self) -> str:
        """Arguments other than the defaults."""
        shown = []
        for name, parameter in self.takes.parameters.items():
            value = vars(self).get(name, vars(self).get(f"_{name}"))
            if isinstance(value, bool | int | float | str | list | tuple) and value != parameter.default:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def classes(
    module: str, base: type[Any], table: Mapping[str, Any], *methods: str, **attributes: Any
) -> dict[str, Any]:
    """A class for each row of a table: its name and arguments, and the function that is its method.

    Where there are several methods, a row has a tuple of functions. `attributes` are those of all classes.
    """
    made, kind = {}, cast(Any, type(base))
    for row, functions in table.items():
        name, _, takes = row.removesuffix(")").partition("(")
        parts = functions if isinstance(functions, tuple) else (functions,)
        body = {"__module__": module, **attributes, **dict(zip(methods, parts, strict=True))}
        made[name] = kind(name, (base,), body, takes=arguments(takes))
    return made
