"""omega|ml's `Omega`: the shelves with its arguments. All they do is `kindler.omega`'s."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from kindler import omega
from kindler.runtime.runtime import Runtime
from kindler.shelves import models, scripts
from kindler.shelves.datasets import shelf as datasets
from kindler.shelves.shelf import Shelf
from kindler.store import Store, Version

__all__ = ["Datasets", "Models", "Omega", "Scripts", "virtualobj"]

Function = TypeVar("Function", bound=Callable[..., Any])


def virtualobj(function: Function) -> Function:
    """Marks a function that is to be stored; any function can be, so this does nothing."""
    return function


class Omega:
    """The shelves and the runtime of one bucket.

    Args:
        url: The store, as `kindler.Omega` takes it.
        bucket: The bucket.
        broker: The runtime's broker.
        trusted: Whether code of the store may run.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        bucket: str = "default",
        broker: str | None = None,
        trusted: bool = False,
    ) -> None:
        self._omega = omega.Omega(url, bucket=bucket, broker=broker)
        self._trusted = trusted

    def __getitem__(self, bucket: str) -> Omega:
        """The same in another bucket."""
        other = Omega(bucket=bucket, trusted=self._trusted)
        other._omega = self._omega[bucket]
        return other

    def __repr__(self) -> str:
        return f"Omega(bucket={self._omega.bucket!r})"

    @property
    def store(self) -> Store:
        """The store."""
        return self._omega.store

    @property
    def models(self) -> Models:
        """The models."""
        return Models(self._omega, self._trusted)

    @property
    def datasets(self) -> Datasets:
        """The datasets."""
        return Datasets(self._omega, self._trusted)

    @property
    def scripts(self) -> Scripts:
        """The functions."""
        return Scripts(self._omega, self._trusted)

    @property
    def runtime(self) -> Runtime:
        """What runs them elsewhere."""
        return self._omega.runtime.options(trusted=self._trusted)

    def close(self) -> None:
        """Close the store and end the runtime's workers."""
        self._omega.close()


class _Trusting(Shelf):
    """A shelf with omega|ml's version numbers (-1 is the newest, -2 the one before), and trust said once."""

    def __init__(self, opened: omega.Omega, trusted: bool) -> None:
        super().__init__(opened.store, opened.bucket)
        self._trusted = trusted

    def put(self, obj: Any, name: str, *, trusted: bool = False, **options: Any) -> Version:
        """Store something; see the shelf of the same name in `kindler.shelves`."""
        return super().put(obj, name, trusted=trusted or self._trusted, **options)

    def get(
        self, name: str, *, version: int | str | None = None, trusted: bool = False, **options: Any
    ) -> Any:
        """What has that name; see the shelf of the same name in `kindler.shelves`."""
        name, version = _version(name, version)
        return super().get(name, version=version, trusted=trusted or self._trusted, **options)


class Models(_Trusting, models.Models):
    """Models."""


class Datasets(_Trusting, datasets.Datasets):
    """Datasets, to which tables are appended unless `append=False`."""

    def put(self, obj: Any, name: str, *, append: bool | None = None, **options: Any) -> Version:
        """Store a dataset.

        Args:
            obj: The data, or a function that makes it.
            name: The name.
            append: Whether its rows follow those that are there; None does so for tables of pandas and
                replaces everything else.
            **options: Those of `kindler.shelves.datasets.shelf.Datasets.put`.
        """
        if append is None:
            pandas: Any = sys.modules.get("pandas")
            append = pandas is not None and isinstance(obj, pandas.DataFrame | pandas.Series)
        mode = options.pop("mode", "append" if append else "replace")
        return super().put(obj, name, mode=mode, **options)


class Scripts(_Trusting, scripts.Scripts):
    """Functions."""


def _version(name: str, version: int | str | None) -> tuple[str, int | str | None]:
    """-1 is the newest, and each below it one version before."""
    if isinstance(version, int) and version < 0:
        return name + "^" * (-version - 1), None
    return name, version
