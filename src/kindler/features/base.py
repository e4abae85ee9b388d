"""What all transformers have in common: three kinds of data, one result, a state that is plain JSON.

A subclass says what it sees in one pandas DataFrame and in a Spark DataFrame, what it learns from all that
was seen, and how one DataFrame of either kind is changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kindler.data.arrays import is_spark_frame
from kindler.data.shards import frames, pytree
from kindler.errors import ConfigError, DataError, NotFittedError
from kindler.xshards import XShards

if TYPE_CHECKING:
    from typing_extensions import Self

_FORMAT = 1
_Data = TypeVar("_Data")


class Transformer(ABC):
    """Learns from data with `fit`, and changes data with `transform`, which gives the same kind of data."""

    _inputs: tuple[str, ...]

    def fit(self, data: Any) -> Self:
        """Learn from all rows.

        Args:
            data: A pandas DataFrame, a Spark DataFrame (classic or Connect), or an XShards of pandas
                DataFrames.

        Returns:
            Itself.

        Raises:
            ConfigError: Not such data, or a column is not there.
            DataError: Values that cannot be used, or none at all.
        """
        if isinstance(data, XShards):
            seen = data.transform_shard(self._seen_in_shard).collect()
        elif is_spark_frame(data):
            if data.isStreaming:
                raise ConfigError(f"{self._name}.fit: cannot fit on a streaming DataFrame.")
            frames.check_columns(self._inputs, data.columns, f"{self._name}.fit")
            seen = [self._seen_by_spark(data)]
        else:
            seen = [self._seen_in_shard(_require_frame(data, self._name))]
        self._learn(seen)
        return self

    def transform(self, data: _Data) -> _Data:
        """Change all rows; other columns stay as they are.

        Args:
            data: As for `fit`, and of any of its kinds. A Spark DataFrame, which may be a stream, is changed
                lazily: complaints about values come when its rows are computed.

        Raises:
            NotFittedError: Before `fit`.
            ConfigError: Not such data, or a column is not there.
            DataError: Values that cannot be used.
        """
        if not self._fitted:
            raise NotFittedError(f"{self._name} is not fitted.\nHint: call fit(data) first.")
        changed: Any
        if isinstance(data, XShards):
            changed = data.transform_shard(self._changed_shard)
        elif is_spark_frame(data):
            frames.check_columns(self._inputs, data.columns, f"{self._name}.transform")  # type: ignore[attr-defined]
            changed = self._changed_by_spark(data)
        else:
            changed = self._changed_shard(_require_frame(data, self._name))
        transformed: _Data = changed
        return transformed

    def fit_transform(self, data: _Data) -> _Data:
        """Learn from data, and change it."""
        return self.fit(data).transform(data)

    def to_dict(self) -> dict[str, Any]:
        """The arguments and what was learned, as JSON can hold it."""
        if not self._fitted:
            raise NotFittedError(f"{self._name} is not fitted.\nHint: call fit(data) first.")
        return {"kind": self._name, "format": _FORMAT, **self._arguments(), "learned": self._learned()}

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Self:
        """The reverse of `to_dict`."""
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
        given = ", ".join(f"{name}={value!r}" for name, value in self._arguments().items())
        return f"{self._name}({given})"

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _seen_in_shard(self, frame: Any) -> Any:
        return self._seen(self._checked(frame))

    def _changed_shard(self, frame: Any) -> Any:
        return self._changed(self._checked(frame))

    def _checked(self, frame: Any) -> Any:
        if not pytree.is_frame(frame):
            raise DataError(
                f"{self._name}: expected shards of pandas DataFrames, received a {type(frame).__name__}."
            )
        frames.check_columns(self._inputs, list(frame.columns), self._name)
        return frame

    @property
    @abstractmethod
    def _fitted(self) -> bool: ...

    @abstractmethod
    def _seen(self, frame: Any) -> Any:
        """What is to be known of a pandas DataFrame; it travels from workers."""

    @abstractmethod
    def _seen_by_spark(self, frame: Any) -> Any:
        """The same of a Spark DataFrame."""

    @abstractmethod
    def _learn(self, seen: Sequence[Any]) -> None:
        """Take in all that was seen."""

    @abstractmethod
    def _changed(self, frame: Any) -> Any:
        """A pandas DataFrame, changed; the one that is given stays as it is."""

    @abstractmethod
    def _changed_by_spark(self, frame: Any) -> Any:
        """A Spark DataFrame, changed lazily."""

    @abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """What the constructor takes."""

    @abstractmethod
    def _learned(self) -> dict[str, Any]:
        """What was learned, as JSON can hold it."""

    @abstractmethod
    def _restore(self, learned: Mapping[str, Any]) -> None:
        """The reverse of `_learned`."""


def _require_frame(data: Any, who: str) -> Any:
    if pytree.is_frame(data):
        return data
    raise ConfigError(
        f"{who}: cannot use a {type(data).__module__}.{type(data).__qualname__}.\n"
        "Hint: pass a pandas DataFrame, a Spark DataFrame, or an XShards of pandas DataFrames."
    )
