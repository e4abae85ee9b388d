"""From the data's columns to what the model takes: the user's transform, collate, and padding. A
`Prepare` is the user's request and travels with the estimator; a `Preparer` applies it to batches."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias

import cloudpickle
import numpy as np

from kindler.data.columns import Array, Column, ColumnPlan, Where, conform
from kindler.data.ragged import AsLists, Pad, PadValue, Ragged, fill_value, gathered, padded, rule_for
from kindler.data.row_order import RowRandom, RowRandoms
from kindler.errors import ConfigError, DataError, KindlerError, first_line

Function: TypeAlias = Callable[..., Any]

_MASK = "_mask"


@dataclass(frozen=True)
class batched:
    """Mark a transform as taking a batch of columns instead of a row.

    The function is called with a dict of columns, an array or a list each, and, if it has a parameter `rngs`,
    with one random generator per row. It returns a dict of columns with the same number of rows.

    >>> @batched
    ... def doubled(columns):
    ...     return {"x": columns["x"] * 2}
    """

    function: Function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """What happens to rows between the data and the model: `from_torch(prepare=Prepare(transform=crop))`.

    Attributes:
        transform: A function of a row. It receives a dict of feature and label columns and, if it has a
            parameter `rng`, a random generator for that row and epoch. It returns a dict of columns for the
            model, and runs in the workers, in parallel with the steps. With `kindler.batched`, a function of
            a batch of columns.
        eval_transform: The same for `evaluate`, validation and `predict`. None uses `transform` there.
        collate: A function of a list of rows that returns a dict of arrays: the batch.
        pad: "batch" pads rows of different lengths to the longest in the batch, a number to that length; or a
            dict of these by column.
        pad_value: The value to pad with, or a dict of values by column. None is 0, and -100 for labels.
        masks: Whether the model gets a mask for each padded feature, after all features: True at real values,
            named after the column with "_mask" appended.
        length_col: A column whose values have, or are, the lengths of rows: each step then trains on rows of
            similar length.
        text: Whether the model itself takes text; set for Keras models on TensorFlow.
    """

    transform: Function | None = None
    eval_transform: Function | None = None
    collate: Function | None = None
    pad: Pad | Mapping[str, Pad] | None = None
    pad_value: PadValue | Mapping[str, PadValue] | None = None
    masks: bool = True
    length_col: str | None = None
    text: bool = False

    @property
    def active(self) -> bool:
        given = (self.transform, self.eval_transform, self.collate, self.pad, self.length_col)
        return any(part is not None for part in given)

    @property
    def ragged(self) -> Literal["text", "all"] | None:
        if self.active:
            return "all"
        return "text" if self.text else None

    @property
    def functions(self) -> dict[str, Function]:
        named = {"transform": self.transform, "eval_transform": self.eval_transform, "collate": self.collate}
        return {name: function for name, function in named.items() if function is not None}

    def function(self, *, trains: bool) -> tuple[str, Function | None]:
        if trains:
            return "transform", self.transform
        if self.eval_transform is not None:
            return "eval_transform", self.eval_transform
        return "transform", getattr(self.transform, "without_chance", self.transform)

    @property
    def augments_all(self) -> bool:
        """Whether evaluated rows are augmented too, for lack of an `eval_transform`."""
        name, function = self.function(trains=False)
        if name != "transform" or function is None or hasattr(self.transform, "without_chance"):
            return False
        return _chance_argument(function) is not None

    def complaints(self) -> Iterator[str]:
        for name, function in self.functions.items():
            if not callable(function):
                yield f"{name} must be a function; received {function!r}."
        for where, pad in _by_column("pad", self.pad):
            fits = pad == "batch" or (isinstance(pad, int) and not isinstance(pad, bool) and pad >= 1)
            if pad is not None and not fits:
                yield f"{where} must be 'batch' or a length of at least 1; received {pad!r}."
        for where, value in _by_column("pad_value", self.pad_value):
            if value is not None and not isinstance(value, int | float | str):
                yield f"{where} must be a number or text; received {value!r}."
        if self.collate is not None and self.pad is not None:
            yield "collate creates the arrays itself, so pad has no effect; pass one of them."
        if self.length_col is not None and not isinstance(self.length_col, str):
            yield f"length_col must be the name of a column; received {self.length_col!r}."


Preparation = Prepare  # its name in files written before 0.2


def _by_column(name: str, given: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(given, Mapping):
        yield from ((f"{name}[{column!r}]", value) for column, value in given.items())
    else:
        yield name, given


@dataclass(slots=True)
class PreparedRows:
    features: dict[str, Array] = field(default_factory=dict)
    labels: dict[str, Array] = field(default_factory=dict)
    padded: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Rows:
    raw: Mapping[str, Any]
    rows: int
    where: Where
    widths: Mapping[str, int]

    def place_of(self, error: Exception) -> int | str:
        named = getattr(error, "positions", None)
        return self.where(named[0]) if isinstance(named, list) and named else self.span

    def only(self, places: list[int]) -> _Rows:
        """Some of them."""
        raw = {name: values[np.array(places, np.int64)] for name, values in self.raw.items()}
        return _Rows(raw, len(places), lambda i: self.where(places[i]), self.widths)

    @property
    def span(self) -> str:
        return f"{self.where(0)} to {self.where(self.rows - 1)}"


class Preparer:
    """Thread-safe. `seed`, epoch and row number determine a row's random numbers; `labels` names label
    columns missing from `columns` in scoring; `copies` gives each thread its own user functions. A
    `lenient` one raises errors of user functions as they are."""

    def __init__(
        self,
        preparation: Prepare,
        columns: ColumnPlan,
        *,
        trains: bool,
        seed: int,
        labels: Sequence[str] = (),
        rank: int | None = None,
        copies: bool = False,
        lenient: bool = False,
    ) -> None:
        self._lenient, self._rows_fail = lenient, False
        self._preparation, self._columns = preparation, columns
        self._trains, self._seed, self._rank = trains, seed, rank
        self._label_names = [column.name for column in columns.labels]
        self._dropped = set(labels) - set(self._label_names)
        self._known = {column.name: column for column in columns.all}
        self._argument, function = preparation.function(trains=trains)
        self._functions = (function, preparation.collate)
        self._copies = cloudpickle.dumps(self._functions) if copies and any(self._functions) else None
        self._local = threading.local()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self._columns.features)

    @property
    def plain(self) -> bool:
        return not any(self._functions)

    def pads(self, name: str) -> bool:
        return bool(rule_for(self._preparation.pad, name) == "batch")

    def __call__(
        self,
        raw: Mapping[str, Any],
        *,
        rows: int,
        where: Where,
        epoch: int = 0,
        numbers: Array | None = None,
        widths: Mapping[str, int] | None = None,
        failed: dict[int, Exception] | None = None,
    ) -> PreparedRows:
        """`failed` gets the rows that a transform raises for, which are left out; without it, the first such
        error is raised. `numbers` are global row numbers; None gives all rows the same random numbers.
        `widths` are the least lengths to pad to: other workers may have longer rows in the step."""
        function, collate = self._own_functions()
        batch = _Rows(raw, rows, where, widths or {})
        made: Mapping[str, Any] = raw
        if function is not None:
            drawn = np.zeros(rows, np.int64) if numbers is None else numbers
            by_batch = getattr(function, "of_batch", None)
            by_batch = function.function if isinstance(function, batched) else by_batch
            if by_batch is not None and (isinstance(function, batched) or not self._rows_fail):
                self._rows_fail = self._lenient  # unless it returns: then row by row, to find all of them
                made = self._by_batch(by_batch, batch, RowRandoms(self._seed, epoch, drawn))
                self._rows_fail = False
            else:
                made = self._by_row(function, batch, epoch, drawn, failed)
                if failed:
                    batch = batch.only([i for i in range(rows) if i not in failed])
        if not batch.rows:
            return PreparedRows()
        if collate is not None:
            made = self._collated(collate, made, batch)
        return self._arranged(made, batch, collated=collate is not None)

    def _own_functions(self) -> tuple[Any, Any]:
        if self._copies is None:
            return self._functions
        if not hasattr(self._local, "functions"):
            self._local.functions = cloudpickle.loads(self._copies)
        functions: tuple[Any, Any] = self._local.functions
        return functions

    def _by_row(
        self, function: Any, batch: _Rows, epoch: int, numbers: Array, failed: dict[int, Exception] | None
    ) -> dict[str, Any]:
        columns = {name: _listed(values) for name, values in batch.raw.items()}
        random, argument, where = RowRandom(self._seed), _chance_argument(function), batch.where
        made: list[Mapping[str, Any]] = []
        for i, values in enumerate(zip(*columns.values(), strict=True)):
            chance = {} if argument is None else {argument: random.of(epoch, int(numbers[i]))}
            row = dict(zip(columns, values, strict=True))
            try:
                made.append(_called(function, row, chance))
            except Exception as exc:  # noqa: BLE001 (raised again, with the row)
                if failed is not None:
                    failed[i] = exc
                    continue
                self._raise(exc, self._argument, where(i))
            self._check_dict(made[-1], self._argument, where(i))
            if made[-1].keys() != made[0].keys():
                raise ConfigError(
                    f"{self._argument} returned the columns {list(made[-1])} for row {where(i)} and"
                    f" {list(made[0])} for row {where(0)}; all rows must have the same."
                )
        return {name: [row[name] for row in made] for name in made[0]} if made else {}

    def _by_batch(self, function: Any, batch: _Rows, randoms: RowRandoms) -> dict[str, Any]:
        argument = _chance_argument(function)
        columns = {n: v.rows() if isinstance(v, Ragged) else v for n, v in batch.raw.items()}
        try:
            made = _called(function, columns, {} if argument is None else {argument: randoms})
        except Exception as exc:  # noqa: BLE001 (raised again, with the rows)
            self._raise(exc, self._argument, batch.place_of(exc))
        self._check_dict(made, self._argument, batch.where(0))
        self._check_rows(made, batch.rows, self._argument)
        return dict(made)

    def _collated(self, collate: Any, made: Mapping[str, Any], batch: _Rows) -> dict[str, Any]:
        columns = {name: _listed(values) for name, values in made.items()}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        try:
            arrays = collate(rows)
        except Exception as exc:  # noqa: BLE001 (raised again, with the rows)
            self._raise(exc, "collate", batch.place_of(exc))
        self._check_dict(arrays, "collate", batch.where(0))
        arrays = {name: _as_array(values) for name, values in arrays.items()}
        self._check_rows(arrays, batch.rows, "collate")
        kept = {name: made[name] for name in self._label_names if name in made and name not in arrays}
        return {**arrays, **kept}

    def _arranged(self, made: Mapping[str, Any], batch: _Rows, *, collated: bool) -> PreparedRows:
        result, masks, raw = PreparedRows(), dict[str, Array](), batch.raw
        if made is raw:
            names = [column.name for column in self._columns.features]
        else:
            inputs = {column.name for column in self._columns.features}  # a label may be one as well
            other = {*self._label_names, *self._dropped} - inputs
            names = [name for name in made if name not in other]
        if not names:
            who = "collate" if collated else self._argument
            raise ConfigError(
                f"{who} returned no features, only {list(made)}.\nHint: the model takes the columns that are "
                "not labels."
            )
        for name in names:
            array, mask = self._column(name, made[name], batch, "feature", collated)
            result.features[name] = array
            if mask is not None:
                result.padded.append(name)
                if self._preparation.masks:
                    masks[name + _MASK] = mask
        taken = [name for name in masks if name in result.features]
        if taken:
            raise ConfigError(
                f"there is a column {taken[0]!r} already, which is what the mask of a padded column would be"
                " called.\nHint: rename it, or pass prepare=Prepare(masks=False)."
            )
        result.features |= masks
        result.padded += masks
        for name in self._label_names:
            values = made[name] if name in made else raw[name]
            array, mask = self._column(name, values, batch, "label", collated and name in made)
            result.labels[name] = array
            result.padded += [name] if mask is not None else []
        return result

    def _column(
        self, name: str, values: Any, batch: _Rows, role: Literal["feature", "label"], collated: bool
    ) -> tuple[Array, Array | None]:
        known, raw = self._known.get(name), batch.raw.get(name)
        column = Column(name=name, role=role, allow_nan=known is not None and known.allow_nan)
        if values is raw and isinstance(values, np.ndarray):
            # Integer labels are int64, also where the column is a feature too and is kept as one.
            wide = role == "label" and (known is None or known.dtype is None) and values.dtype.kind in "iu"
            return (values.astype(np.int64, copy=False) if wide else values), None
        pad = None if collated else rule_for(self._preparation.pad, name)
        rows: Any = values
        if not isinstance(values, Ragged) or values.is_text:
            listed = values.rows() if isinstance(values, Ragged) else values
            rows = gathered(listed, self._as_lists(pad, raw))
        if isinstance(rows, Ragged) and pad is not None:
            fill = fill_value(self._preparation.pad_value, name, rows, role)
            width = batch.widths.get(name)
            array, mask = padded(rows, pad, fill, width=width, column=name, where=batch.where)
            return self._checked(array, column, batch.where), mask
        even: Array | None = rows.even() if isinstance(rows, Ragged) else rows
        if even is None:
            raise _uneven(name, values, batch.where)
        return self._checked(even, column, batch.where), None

    def _as_lists(self, pad: Any, before: Any) -> AsLists:
        """Decided per column, so that padding does not depend on the batch."""
        if pad is None:
            return "never"
        if isinstance(self._preparation.pad, Mapping) or isinstance(before, Ragged):
            return "always"
        return "never" if isinstance(before, np.ndarray) else "lists"

    def _checked(self, array: Array, column: Column, where: Where) -> Array:
        if array.dtype.kind not in "OUS":
            return conform(array, column, where=where)
        if not self._preparation.text:
            hint = "convert it to numbers in transform or collate."
            if column.role == "label":
                hint = getattr(self._preparation.collate, "hint_for_labels", hint)
            raise DataError(
                f"is still text or bytes, and the model takes numbers.\nHint: {hint}",
                column=column.name,
                row=where(0),
            )
        return array.astype(object, copy=False)

    def _check_dict(self, made: Any, who: str, row: int | str) -> None:
        if not isinstance(made, Mapping) or not made or not all(isinstance(name, str) for name in made):
            shown = "an empty dict" if isinstance(made, Mapping) and not made else f"a {type(made).__name__}"
            raise ConfigError(
                f"{who} returned {shown} for row {row}; it must return a dict of columns by name.\n"
                f'Hint: {who}=lambda row: {{"{self._columns.features[0].name}": ...}}.'
            )

    def _check_rows(self, made: Mapping[str, Any], rows: int, who: str) -> None:
        for name, values in made.items():
            count = len(values) if hasattr(values, "__len__") and np.ndim(values) else None
            if count != rows:
                found = "a single value" if count is None else f"{count} rows"
                raise ConfigError(f"{who} returned {found} of {name!r} for a batch of {rows} rows.")

    def _raise(self, exc: Exception, who: str, row: int | str) -> NoReturn:
        if self._lenient:
            raise exc
        at = "" if self._rank is None else f", worker {self._rank}"
        names = ", ".join(repr(column.name) for column in (*self._columns.features, *self._columns.labels))
        if isinstance(exc, DataError) and exc.row is None:
            problem = str(exc).partition(": ")[2] if exc.column is not None else str(exc)
            raise DataError(f"{problem} (in {who}{at})", column=exc.column, row=row) from exc
        place = f"in {who}, row {row}, columns {names}{at}"
        if isinstance(exc, KindlerError):
            raise DataError(f"{exc} ({place})") from exc
        said = f"{first_line(exc) if str(exc) else type(exc).__name__} ({place})"
        hint = ""
        if isinstance(exc, KeyError) and not self._trains and not self._label_names:
            hint = "\nHint: in prediction rows have no labels, so the transform gets only feature columns."
        exc.args = (said + hint,)
        if place not in str(exc):  # a class that does not say its arguments
            raise DataError(f"{type(exc).__name__}: {said}{hint}") from exc
        raise exc


def _uneven(name: str, values: Any, where: Where) -> DataError:
    shapes = [np.shape(value) for value in (values.rows() if isinstance(values, Ragged) else values)]
    usual = Counter(shapes).most_common(1)[0][0]
    odd = [i for i, shape in enumerate(shapes) if shape != usual]
    like = where(shapes.index(usual))
    return DataError(
        f"has shape {shapes[odd[0]]} where row {like} of the same batch has {usual}; the rows of a"
        ' batch become one array.\nHint: Prepare(pad="batch") or Prepare(pad=n) pads them, with a mask; a'
        " transform can cut or resize them; and collate can build the batch itself.",
        column=name,
        row=where(odd[0]),
        positions=odd,
        common=f"has another shape than {usual}",
    )


def _called(function: Any, given: Any, chance: Mapping[str, Any]) -> Any:
    if "" in chance:
        return function(given, chance[""])
    return function(given, **chance)


def _chance_argument(function: Any) -> str | None:
    """How to pass random generators: a keyword, "" for the second position, None for not at all."""
    function = function.function if isinstance(function, batched) else function
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    for name in ("rng", "rngs"):
        found = next((p for p in parameters if p.name == name), None)
        if found is not None:
            return "" if found.kind is found.POSITIONAL_ONLY else name
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return "" if len(needed) == 2 else None


def _listed(values: Any) -> list[Any]:
    return values.rows() if isinstance(values, Ragged) else list(values)


def _as_array(values: Any) -> Any:
    detach = getattr(values, "detach", None)
    array = np.asarray(detach().cpu() if callable(detach) else values)
    if array.dtype == object and not all(isinstance(value, str | bytes) for value in array.reshape(-1)):
        return values  # lists of different lengths: the complaint names a row
    return array
