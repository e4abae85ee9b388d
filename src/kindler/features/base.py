"""Base of the transformers: three kinds of data, one result, state that is plain JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from kindler.data.arrays import is_spark_frame
from kindler.data.shards import frames, pytree
from kindler.errors import ConfigError, DataError, NotFittedError
from kindler.xshards import XShards

if TYPE_CHECKING:
    from typing_extensions import Self

Names: TypeAlias = "str | Sequence[str]"

_FORMAT = 1
_Data = TypeVar("_Data")


class Transformer(ABC):
    """Learns from data with `fit`, and changes data with `transform`, which returns the same kind of data.

    Subclasses list their constructor arguments in `_arguments` (attributes, except for the columns), and what
    they learn in `_learned` (attributes with a trailing "_").
    """

    _arguments: ClassVar[tuple[str, ...]]
    _learned: ClassVar[tuple[str, ...]]

    def __init__(self, inputCol: Names | None, outputCol: Names | None, *, packs: bool = False) -> None:
        self._inputs = self._names(inputCol, "inputCol")
        self._packed = packs and isinstance(outputCol, str) and len(self._inputs) > 1
        self._outputs = self._inputs if outputCol is None else self._names(outputCol, "outputCol")
        if not self._packed and len(self._outputs) != len(self._inputs):
            raise ConfigError(
                f"{self._name}: {len(self._inputs)} input columns, but outputCol={outputCol!r} names"
                f" {len(self._outputs)}."
            )

    def fit(self, data: Any) -> Self:
        """Learn from all rows.

        Args:
            data: A pandas DataFrame, a Spark DataFrame (classic or Connect), or an XShards of pandas
                DataFrames.

        Returns:
            This transformer.

        Raises:
            ConfigError: The data is of another kind, or a column is missing.
            DataError: Values cannot be used, or there are none.
        """
        if isinstance(data, XShards):
            seen = data.transform_shard(lambda frame: self._seen(self._checked(frame))).collect()
        elif is_spark_frame(data):
            if data.isStreaming:
                raise ConfigError(f"{self._name}.fit: cannot fit on a streaming DataFrame.")
            frames.check_columns(self._inputs, data.columns, f"{self._name}.fit")
            seen = [self._seen_by_spark(data)]
        else:
            seen = [self._seen(self._checked(self._require_frame(data)))]
        self._learn(seen)
        return self

    def transform(self, data: _Data) -> _Data:
        """Transform all rows; other columns stay unchanged.

        Args:
            data: As for `fit`. A Spark DataFrame, which may be streaming, is transformed lazily: errors
                about values appear when its rows are computed.

        Raises:
            NotFittedError: `fit` has not been called.
            ConfigError: The data is of another kind, or a column is missing.
            DataError: Values cannot be used.
        """
        self._require_fitted()
        source: Any = data
        changed: Any
        if isinstance(source, XShards):
            changed = source.transform_shard(lambda frame: self._changed(self._checked(frame)))
        elif is_spark_frame(source):
            frames.check_columns(self._inputs, source.columns, f"{self._name}.transform")
            changed = self._changed_by_spark(source)
        else:
            changed = self._changed(self._checked(self._require_frame(source)))
        transformed: _Data = changed
        return transformed

    def fit_transform(self, data: _Data) -> _Data:
        """Fit on the data, then transform it."""
        return self.fit(data).transform(data)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments and the learned state as JSON-serialisable values."""
        self._require_fitted()
        learned = {name: getattr(self, f"{name}_") for name in self._learned}
        plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in learned.items()}
        return {"kind": self._name, "format": _FORMAT, **self._given(), "learned": plain}

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Self:
        """Restore a transformer from `to_dict`."""
        rest = dict(said)
        kind, form = rest.pop("kind", None), rest.pop("format", None)
        if kind != cls.__name__ or form != _FORMAT or "learned" not in rest:
            raise ConfigError(
                f"from_dict: received kind {kind!r} and format {form!r}; {cls.__name__} needs"
                f" {cls.__name__!r} and {_FORMAT}."
            )
        learned = rest.pop("learned")
        instance = cls(**rest)
        instance._restore(learned)
        return instance

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(f'{name}={value!r}' for name, value in self._given().items())})"

    def _given(self) -> dict[str, Any]:
        outputs: Any = self._outputs[0] if self._packed else list(self._outputs)
        columns = {"inputCol": list(self._inputs), "outputCol": outputs}
        return {name: columns[name] if name in columns else getattr(self, name) for name in self._arguments}

    def _names(self, columns: Names | None, argument: str) -> tuple[str, ...]:
        names = (columns,) if isinstance(columns, str) else tuple(columns or ())
        if not names or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"{self._name}({argument}={columns!r}): must be a column name, or a list of them."
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"{self._name}({argument}=...): {twice} more than once.")
        return names

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _require_fitted(self) -> None:
        if not hasattr(self, f"{self._learned[0]}_"):
            raise NotFittedError(f"{self._name} is not fitted.\nHint: call fit(data) first.")

    def _require_frame(self, data: Any) -> Any:
        if pytree.is_frame(data):
            return data
        raise ConfigError(
            f"{self._name}: cannot use a {type(data).__module__}.{type(data).__qualname__}.\n"
            "Hint: pass a pandas DataFrame, a Spark DataFrame, or an XShards of pandas DataFrames."
        )

    def _checked(self, frame: Any) -> Any:
        if not pytree.is_frame(frame):
            raise DataError(
                f"{self._name}: expected shards of pandas DataFrames, received a {type(frame).__name__}."
            )
        frames.check_columns(self._inputs, list(frame.columns), self._name)
        return frame

    @abstractmethod
    def _seen(self, frame: Any) -> Any:
        """Statistics of a pandas DataFrame; sent from the workers."""

    @abstractmethod
    def _seen_by_spark(self, frame: Any) -> Any:
        """The same for a Spark DataFrame."""

    @abstractmethod
    def _learn(self, seen: Sequence[Any]) -> None: ...

    @abstractmethod
    def _changed(self, frame: Any) -> Any:
        """A transformed copy of a pandas DataFrame."""

    @abstractmethod
    def _changed_by_spark(self, frame: Any) -> Any: ...

    @abstractmethod
    def _restore(self, learned: Mapping[str, Any]) -> None:
        """Restore the learned state from `to_dict`."""
