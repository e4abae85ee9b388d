"""A model that stays loaded in the process that scores with it. A Predictor is sent to where the rows are,
and loads its model once per process."""

from __future__ import annotations

import bisect
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from typing import Any, SupportsBytes

import numpy as np
import pyarrow as pa

from kindler.data.batches import in_pool, stacked
from kindler.data.columns import ColumnPlan
from kindler.data.preparation import Prepare, Preparer
from kindler.data.ragged import concatenated
from kindler.engine.placement import TaskPlace, enter_program_path, program_path
from kindler.errors import ConfigError
from kindler.frameworks.base import BaseReplica
from kindler.frameworks.registry import FRAMEWORKS
from kindler.inference.host_model import HostModel, Sharing, gpu_of
from kindler.inference.loaded import LoadedModels
from kindler.inference.outputs import to_arrow
from kindler.inference.row_errors import Batch, Failures, RowErrors

Arrays = tuple[np.ndarray[Any, Any], ...]

_loaded: LoadedModels[BaseReplica] = LoadedModels()
_WINDOW = 16  # batches whose rows are sorted by length
_useless: set[str] = set()  # GPUs that the framework of this host cannot use


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a loaded model depends on: `load` uses only these fields, and `key` covers them all.

    `spec` and `state` are bytes, or give them; `state` is empty for an untrained model, or where the spec has
    it. `content` is their digest, if known. `threads` and `precision` None leave process and model as they
    are. `sys_path` is the driver's: the model's own modules may be on it.
    """

    framework: str
    spec: bytes | SupportsBytes
    state: bytes | SupportsBytes
    feature_names: tuple[str, ...]
    device: str
    seed: int
    threads: int | None = None
    sys_path: tuple[str, ...] = field(default_factory=program_path)
    precision: str | None = None
    content: str | None = None

    @property
    def key(self) -> str:
        """A digest, so that the bytes need not stay in memory to be compared."""
        digest = hashlib.sha256()
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("spec", "state"):
                value = bytes(value) if self.content is None else None
            part = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
            digest.update(f"{each.name}:{len(part)}:".encode())
            digest.update(part)
        return digest.hexdigest()

    def whole(self) -> Recipe:
        return replace(self, spec=bytes(self.spec), state=bytes(self.state))

    def load(self) -> BaseReplica:
        enter_program_path(self.sys_path)
        replica: BaseReplica = FRAMEWORKS.load(self.framework).from_bytes(
            bytes(self.spec),
            device=self.device,
            seed=self.seed,
            threads=self.threads,
            feature_names=self.feature_names,
        )
        if self.precision is not None:
            replica.set_precision(self.precision)
        if state := bytes(self.state):
            replica.load_state(state, weights_only_model=True)
        return replica


@dataclass(kw_only=True, eq=False)
class Predictor:
    """Scores batches of feature arrays.

    `output_cols` None means the model's own names if it returns a dict, else "prediction", or "prediction_0",
    ... for several. `labels` are the columns it was trained on as labels, which a transform may still return.
    With `stack`, prepared features are joined into one float32 matrix. `sharing` None has each process load
    its own model. With `lenient`, rows may fail, at most `max_errors` of them; `failures` counts those of
    this process. With `error_col`, the last output is their errors. `like` are outputs without rows, if it is
    known what outputs are like.
    """

    recipe: Recipe
    columns: ColumnPlan
    batch_size: int
    output_cols: tuple[str, ...] | None = None
    finish: Callable[[list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]] | None = None
    types: tuple[Any, ...] | None = None
    preparation: Prepare | None = None
    labels: tuple[str, ...] = ()
    stack: bool = False
    sharing: Sharing | None = None
    lenient: bool = False
    max_errors: int | None = None
    error_col: bool = False
    like: tuple[np.ndarray[Any, Any], ...] | None = None
    failures: Failures = field(default_factory=Failures, init=False)
    _worked: bool = field(default=False, init=False, repr=False)
    _prepared_names: tuple[str, ...] | None = field(default=None, init=False, repr=False)
    _seen_names: tuple[tuple[str, ...] | None] | None = field(default=None, init=False, repr=False)
    _key: str | None = field(default=None, init=False, repr=False)

    def with_threads(self, threads: int | None) -> Predictor:
        return replace(self, recipe=replace(self.recipe, threads=threads))

    def lent(self, lend: Callable[[str, bytes], bytes | SupportsBytes]) -> Predictor:
        """Handles instead of bytes: a process that has the model needs none. `lend` gets a unique name."""
        recipe, content = self.recipe, self.recipe.content
        if content is None:
            return self
        spec, state = (lend(f"{content}-{part}", bytes(getattr(recipe, part))) for part in ("spec", "state"))
        return replace(self, recipe=replace(recipe, spec=spec, state=state))

    @property
    def _own_recipe(self) -> Recipe:
        names = self._prepared_names
        return self.recipe if names is None else replace(self.recipe, feature_names=names)

    def replica(self) -> BaseReplica:
        """Loaded once per process."""
        self._key = self._key or self._own_recipe.key
        return _loaded.get(self._key, self._own_recipe.load, content=self.recipe.content)

    def score(
        self, chunks: Iterable[Arrays], place: TaskPlace | None = None
    ) -> Iterator[list[np.ndarray[Any, Any]]]:
        """In batches of `batch_size`, whatever the chunk sizes; `place` is set if tasks may share the
        model."""
        if not self.lenient:
            yield from self._batches(chunks, place, None)
            return
        errors = RowErrors(
            self.failures,
            batch_size=self.batch_size,
            most=self.max_errors,
            column=self.error_col,
            like=self.like,
            worked=self._worked,
        )
        try:
            yield from errors.completed(self._batches(errors.readable(chunks), place, errors))
        finally:
            self._worked = errors.worked

    def _batches(
        self, chunks: Iterable[Arrays], place: TaskPlace | None, errors: RowErrors | None
    ) -> Iterator[list[np.ndarray[Any, Any]]]:
        if self.preparation is None:
            return self._scored(fixed_batches(chunks, self.batch_size), place, errors)
        seen = _Places()
        keys = getattr(self.preparation.collate, "keys", None)
        if keys is not None:
            return self._by_length(seen, chunks, self.preparation, keys, place, errors)
        batches = fixed_batches(seen.watched(chunks), self.batch_size)
        numbered = (
            (range(number * self.batch_size, number * self.batch_size + len(batch[0])), batch)
            for number, batch in enumerate(batches)
        )
        return self._scored(self._prepared(numbered, seen, self.preparation, errors), place, errors)

    def _by_length(
        self,
        seen: _Places,
        chunks: Iterable[Arrays],
        preparation: Prepare,
        keys: Callable[[Arrays], list[Any]],
        place: TaskPlace | None,
        errors: RowErrors | None,
    ) -> Iterator[list[np.ndarray[Any, Any]]]:
        """Rows of similar length are computed together, and equal rows once, within windows of some batches.
        Results have the order of the rows."""
        windows: deque[tuple[np.ndarray[Any, Any], int]] = deque()  # where each row's result is, of how many

        def numbered() -> Iterator[tuple[Sequence[int], Arrays]]:
            start = 0
            for window in fixed_batches(seen.watched(chunks), self.batch_size * _WINDOW):
                rows = keys(window)
                places = {key: i for i, key in reversed(list(enumerate(rows)))}
                order = sorted(places.values(), key=lambda i: (-_length(rows[i]), i))
                rank = {rows[i]: number for number, i in enumerate(order)}
                windows.append((np.array([rank[key] for key in rows]), len(order)))
                for first in range(0, len(order), self.batch_size):
                    chosen = np.array(order[first : first + self.batch_size])
                    yield (start + chosen).tolist(), tuple(column[chosen] for column in window)
                start += len(rows)

        parts: list[list[np.ndarray[Any, Any]]] = []
        for outputs in self._scored(self._prepared(numbered(), seen, preparation, errors), place, errors):
            parts.append(outputs)
            order, different = windows[0]
            if sum(len(part[0]) for part in parts) == different:
                yield [np.concatenate(column)[order] for column in zip(*parts, strict=True)]
                windows.popleft()
                parts.clear()

    def _prepared(
        self,
        batches: Iterator[tuple[Sequence[int], Arrays]],
        seen: _Places,
        preparation: Prepare,
        errors: RowErrors | None,
    ) -> Iterator[Any]:
        """The next batch is prepared while the model computes."""
        preparer = Preparer(
            preparation,
            self.columns,
            trains=False,
            seed=self.recipe.seed,
            labels=self.labels,
            lenient=errors is not None,
        )
        names = [column.name for column in self.columns.features]

        def features(numbers: Sequence[int], batch: Arrays, failed: dict[int, Exception] | None) -> Any:
            raw = dict(zip(names, batch, strict=True))
            return preparer(
                raw, rows=len(batch[0]), where=lambda row: seen(numbers[row]), failed=failed
            ).features

        def prepare(job: tuple[Sequence[int], Arrays]) -> Any:
            numbers, batch = job
            if errors is None:
                return features(numbers, batch, None)

            def some(rows: Any, failed: dict[int, Exception]) -> Any:
                if rows is None:
                    return features(numbers, batch, failed) or None
                chosen = tuple(column[rows] for column in batch)
                return features([numbers[row] for row in rows], chosen, failed) or None

            return errors.prepared(len(numbers), some)

        with closing(in_pool(batches, prepare, threads=1, name="kindler-transform")) as prepared:
            for made in prepared:
                ready = made.inputs if isinstance(made, Batch) else made
                if ready is None:
                    yield made
                    continue
                if self._prepared_names is None:
                    self._prepared_names, self._key = tuple(ready), None
                ready = stacked(ready, stack=self.stack)
                yield replace(made, inputs=ready) if isinstance(made, Batch) else ready

    def _scored(
        self, batches: Iterator[Any], place: TaskPlace | None, errors: RowErrors | None
    ) -> Iterator[list[np.ndarray[Any, Any]]]:
        first = next(batches, None)
        if first is None:
            return
        # Not before the first batch: what prepared rows are called shows in them.
        with self._model(place) as model:
            batches = chain([first], batches)
            if errors is None:
                yield from self._computed(model, batches)
                return
            whole = (each if isinstance(each, Batch) else Batch(len(each[0]), each) for each in batches)
            lend = partial(_lent, copies=not getattr(model, "takes_read_only", True))
            yield from errors.scored(whole, partial(self._computed, model), lend)

    def _computed(
        self, model: BaseReplica | HostModel, batches: Iterator[Arrays]
    ) -> Iterator[list[np.ndarray[Any, Any]]]:
        for scored in model.predict_all(batches):
            self._check(scored.outputs, scored.rows)
            if self._seen_names is not None and scored.names != self._output_names:
                raise ConfigError(
                    f"the model's outputs must have the same names in every batch; received"
                    f" {scored.names} after {self._output_names}."
                )
            self._seen_names = (scored.names,)
            yield scored.outputs if self.finish is None else self.finish(scored.outputs)

    @contextmanager
    def _model(self, place: TaskPlace | None) -> Iterator[BaseReplica | HostModel]:
        shared = None if place is None or self.sharing is None else self._shared(place, self.sharing)
        if shared is None:
            yield self.replica()
            return
        with closing(shared):
            yield shared

    def _shared(self, place: TaskPlace, sharing: Sharing) -> HostModel | None:
        """None if there is no GPU that it could compute on."""
        gpu = gpu_of(self.recipe.device, place, sharing.mode)
        always = sharing.mode == "always"
        if gpu is None or gpu in _useless or not (always or FRAMEWORKS.spec(self.recipe.framework).gpus):
            return None
        shared = HostModel.reached(self._own_recipe, sharing, gpu)
        if shared.on_gpu or always:
            return shared
        shared.close()
        _useless.add(gpu)  # what is installed here cannot use it
        return None

    @property
    def _output_names(self) -> tuple[str, ...] | None:
        return self.replica().output_names if self._seen_names is None else self._seen_names[0]

    def tried(self, sample: Arrays) -> Predictor:
        """With names and types of the outputs, as they are for some of these rows."""
        here = replace(self, error_col=False, max_errors=None, recipe=replace(self.recipe, threads=None))
        outputs = next(here.score([sample]))
        return replace(
            self,
            output_cols=here.names(len(outputs)),
            types=tuple(to_arrow(output).type for output in outputs),
            like=tuple(np.asarray(output[:0]) for output in outputs),
        )

    def names(self, outputs: int) -> tuple[str, ...]:
        """Call it after a batch was scored; outputs that the model returns in a dict keep their names."""
        if not self.error_col:
            return self._own_names(outputs)
        names = self._own_names(outputs - 1)
        return (*names, f"{names[0]}_error")

    @property
    def added_types(self) -> list[pa.DataType] | None:
        """Of all columns that it adds, if they are known."""
        return None if self.types is None else [*self.types, *[pa.string()] * self.error_col]

    def _own_names(self, outputs: int) -> tuple[str, ...]:
        named = self._output_names
        if self.output_cols is None and named is not None:
            return named
        if self.output_cols is None:
            many = tuple(f"prediction_{i}" for i in range(outputs))
            return ("prediction",) if outputs == 1 else many
        if len(self.output_cols) != outputs:
            raise ConfigError(
                f"output_cols={list(self.output_cols)} names {len(self.output_cols)} columns,"
                f" but the model has {outputs} outputs."
            )
        return self.output_cols

    @property
    def kinds(self) -> dict[str, Any]:
        """The Arrow types of the outputs' columns that are known."""
        return dict(zip(self.output_cols or (), self.types or (), strict=False))

    def outputs_are_named(self) -> bool:
        return self.output_cols is None and self._output_names is not None

    def _check(self, outputs: Sequence[np.ndarray[Any, Any]], rows: int) -> None:
        for output in outputs:
            if output.ndim == 0 or len(output) != rows:
                raise ConfigError(
                    f"the first dimension of every output must be the rows; the model returned shape"
                    f" {output.shape} for {rows} rows."
                )


def _length(key: Any) -> int:
    return len(key) if isinstance(key, str | bytes) else sum(map(len, key))


def _lent(batch: Arrays, *, copies: bool) -> Arrays:
    """A batch that is computed again must be what it was, and models may write to their inputs."""
    if copies:
        return tuple(np.array(array) for array in batch)
    views = tuple(array.view() for array in batch)
    for view in views:
        view.flags.writeable = False
    return views


def forget_model(content: str) -> None:
    _loaded.forget(content)


def fixed_batches(chunks: Iterable[Arrays], size: int) -> Iterator[Arrays]:
    """Rebatch to exactly `size` rows, except for the last batch; views where possible.

    >>> chunks = [(np.arange(3),), (np.arange(3, 5),), (np.arange(5, 9),)]
    >>> [batch[0].tolist() for batch in fixed_batches(chunks, 4)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    """
    pending: list[Arrays] = []
    rows = 0
    for chunk in chunks:
        while len(chunk[0]) and rows + len(chunk[0]) >= size:
            cut = size - rows
            pending.append(tuple(array[:cut] for array in chunk))
            chunk = tuple(array[cut:] for array in chunk)
            yield _joined(pending)
            pending, rows = [], 0
        if len(chunk[0]):
            pending.append(chunk)
            rows += len(chunk[0])
    if pending:
        yield _joined(pending)


def _joined(parts: Sequence[Arrays]) -> Arrays:
    return parts[0] if len(parts) == 1 else tuple(concatenated(column) for column in zip(*parts, strict=True))


class _Places:
    """Names rows counted over all chunks, by each chunk's own `where`."""

    def __init__(self) -> None:
        self._starts: list[int] = [0]
        self._names: list[Callable[[int], int | str] | None] = []

    def watched(self, chunks: Iterable[Arrays]) -> Iterator[Arrays]:
        for chunk in chunks:
            self._names.append(getattr(chunk, "where", None))
            self._starts.append(self._starts[-1] + len(chunk[0]))
            yield chunk

    def __call__(self, row: int) -> int | str:
        place = bisect.bisect_right(self._starts, row) - 1
        name = self._names[place] if place < len(self._names) else None
        return row if name is None else name(row - self._starts[place])
