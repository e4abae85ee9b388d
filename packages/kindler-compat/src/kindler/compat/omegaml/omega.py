"""omega|ml's `Omega`: the shelves with its arguments. All they do is `kindler.Store`'s."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kindler import storage
from kindler.compat.omegaml.labels import Runtime
from kindler.compat.omegaml.revisions import MARK, changed, is_date, marked, picked
from kindler.errors import ConfigError
from kindler.models.code import PLAIN
from kindler.models.registry import MODEL_KINDS
from kindler.runtime.messages import TaskSettings
from kindler.shelves import datasets, models
from kindler.shelves import shelf as shelves
from kindler.shelves.expressions import parse_expression
from kindler.shelves.shelf import Shelf
from kindler.store import OvertakenError, Version, VersionStore
from kindler.store.names import parse_selector

__all__ = ["Datasets", "Models", "Omega", "SavedModel", "Scripts", "virtualobj"]

_TRIES = 1000
Function = TypeVar("Function", bound=Callable[..., Any])


def virtualobj(function: Function) -> Function:
    """Marks a function that is to be stored.

    As a dataset it is called as omega|ml does it: with `data`, `method`, `meta` and `store` by name, as far
    as it takes them.
    """
    setattr(function, PLAIN, True)
    return function


class Omega:
    """The shelves and the runtime of one bucket."""

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        bucket: str = "default",
        broker: str | None = None,
        trusted: bool = False,
    ) -> None:
        self._omega = storage.Store(url, bucket=bucket, broker=broker)
        self._trusted = trusted
        self._label: str | None = None

    def __getitem__(self, bucket: str) -> Omega:
        other = Omega(bucket=bucket, trusted=self._trusted)
        other._omega = self._omega[bucket]
        return other

    def __repr__(self) -> str:
        return f"Omega(bucket={self._omega.bucket!r})"

    @property
    def store(self) -> VersionStore:
        return self._omega.store

    @property
    def models(self) -> Models:
        return Models(self._omega, self._trusted)

    @property
    def datasets(self) -> Datasets:
        return Datasets(self._omega, self._trusted)

    @property
    def scripts(self) -> Scripts:
        return Scripts(self._omega, self._trusted)

    @property
    def runtime(self) -> Runtime:
        settings = TaskSettings(trusted=self._trusted, label=self._label or TaskSettings().label)
        return Runtime(self._omega.store, self._omega.bucket, self._omega.engine, settings, self._require)

    def _require(self, label: str | None) -> None:
        self._label = label

    def close(self) -> None:
        """Close the store and end the runtime's workers."""
        self._omega.close()


class _Trusting(Shelf):
    """A shelf with omega|ml's version numbers (-1 is the newest, -2 the one before), and trust said once."""

    def __init__(self, opened: storage.Store, trusted: bool) -> None:
        super().__init__(opened.store, opened.bucket)
        self._trusted = trusted

    def put(self, obj: Any, name: str, *, trusted: bool = False, **options: Any) -> Version:
        """Store something; see the shelf of the same name in `kindler.shelves`."""
        return super().put(obj, name, trusted=trusted or self._trusted, **options)

    def get(self, name: str, *, version: Any = None, trusted: bool = False, **options: Any) -> Any:
        """What has that name; see the shelf of the same name in `kindler.shelves`."""
        name, version = self._which(name, version)
        return super().get(name, version=version, trusted=trusted or self._trusted, **options)

    def _which(self, name: str, version: Any) -> tuple[str, int | str | None]:
        """The store's version for one of omega|ml's: -1 is the newest, a date the last one until then."""
        if isinstance(version, int) and version < 0:
            return name + "^" * (-version - 1), None
        if is_date(version):
            return name, picked(self.versions(name), version, name).number
        return name, version

    def promote(
        self,
        name: str,
        to: Shelf | Omega | None = None,
        *,
        asname: str | None = None,
        bucket: str | None = None,
        tag: str | None = None,
    ) -> Version:
        """Make a version the newest of another bucket or store, or the one of a tag."""
        if to is None:
            return super().promote(name, bucket=bucket, tag=tag)
        shelf = getattr(to, self.shelf) if isinstance(to, Omega) else to
        there = asname or parse_selector(name).name
        if shelf.shelf != self.shelf:
            raise ConfigError(f"{name!r} is one of the {self.shelf}, and {shelf!r} has others.")
        if shelf.store.url == self.store.url:
            return self.copy(name, there, bucket=shelf.bucket, tag=tag)
        with tempfile.TemporaryDirectory(prefix="kindler-promote-") as folder:
            return shelf.import_(self.export(name, Path(folder) / "version.zip"), there, tag=tag)

    def revisions(self, name: str, *, raw: bool = False) -> list[Any]:
        """The versions of a name: `@latest`, then those with tags, then all; as versions if `raw`."""
        tags = ["latest", *sorted(self.tags(name))]
        found = [f"{name}@{tag}" for tag in tags] + [str(version) for version in self.versions(name)]
        return [self.metadata(one) for one in found] if raw else found


class Models(_Trusting, models.Models):
    def put(self, obj: Any, name: str, *, as_savedmodel: bool = False, **options: Any) -> Version:
        if not as_savedmodel:
            return super().put(obj, name, **options)
        with tempfile.TemporaryDirectory(prefix="kindler-savedmodel-") as folder:
            path = Path(folder) / "model"
            if not hasattr(obj, "export"):
                raise ConfigError(f"as_savedmodel=True: a {type(obj).__name__} is not a Keras model.")
            with contextlib.redirect_stdout(io.StringIO()):  # Keras describes what it exports
                obj.export(str(path))
            return super().put(path, name, **options)

    def get(self, name: str, *, version: Any = None, **options: Any) -> Any:
        """What has that name; a SavedModel has `predict`."""
        found = super().get(name, version=version, **options)
        bare, number = self._which(name, version)
        if "local" not in options and self.metadata(bare, version=number).kind == "savedmodel":
            return SavedModel(found)
        return found


class SavedModel:
    """A SavedModel as omega|ml gives it: with `predict`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._predictor = MODEL_KINDS.handler("savedmodel").predictor(model)  # type: ignore[attr-defined]

    def predict(self, data: Any) -> Any:
        """The output for each row; several outputs as a dict."""
        return self._predictor(data)

    def fit(self, *args: Any, **options: Any) -> Any:
        raise ConfigError(
            "a SavedModel cannot be fitted.\nHint: store the Keras model without as_savedmodel."
        )


class Datasets(_Trusting, datasets.Datasets):
    """Datasets, to which tables are appended unless `append=False`."""

    def put(
        self,
        obj: Any,
        name: str,
        *,
        append: bool | None = None,
        revisions: bool = False,
        revision_dt: Any = None,
        delete: bool = False,
        replace: bool = False,
        **options: Any,
    ) -> Any:
        """Store a dataset, or hand it to the virtual dataset that has this name.

        Tables of pandas are appended unless `append=False`. With `revisions` each state can be read again:
        `put` changes rows by their index, or with `delete` takes them away. `replace` takes a virtual
        dataset's place.
        """
        asked = parse_expression(name)
        latest = self._latest(self._address(asked.name))
        if latest is not None and latest.kind == "function" and not replace and not callable(obj):
            return self._handed(obj, latest, {**asked.arguments, **options})
        if asked.arguments:
            raise ConfigError(f"{name!r}: only a stored function takes {{k=v}}.")
        has = latest is not None and MARK in latest.attributes
        if revisions and latest is not None and not has:
            raise ConfigError(f"{name!r} exists without revisions.\nHint: drop it first.")
        if (delete or revision_dt is not None) and not (revisions or has):
            raise ConfigError(f"{name!r} has no revisions.\nHint: put(..., revisions=True) starts them.")
        if (revisions or has) and append is not False and not replace:
            return self._revised(obj, name, delete, revision_dt, options)
        if append is None:
            pandas: Any = sys.modules.get("pandas")
            append = pandas is not None and isinstance(obj, pandas.DataFrame | pandas.Series)
        mode = options.pop("mode", "append" if append and not replace else "replace")
        return super().put(obj, name, mode=mode, **options)

    def _revised(self, obj: Any, name: str, delete: bool, when: Any, options: dict[str, Any]) -> Version:
        """A revision more: of what is there, also if others change it at the same time."""
        attributes = marked(options.pop("attributes", None), when)
        trusted = options.pop("trusted", False) or self._trusted
        for _ in range(_TRIES):
            latest = self._latest(self._address(name))
            before = None if latest is None else super().get(str(latest))
            frame = changed(before, obj, delete=delete)
            number = 0 if latest is None else latest.number
            stored: dict[str, Any] = {"attributes": attributes, "trusted": trusted, "replaces": number}
            try:
                return self._put(frame, name, mode="replace", **stored, **options)
            except OvertakenError:
                continue  # another one was quicker, and this one changes what that one made
        raise ConfigError(f"{name!r} has too many concurrent writers.")

    def _handed(self, obj: Any, version: Version, arguments: dict[str, Any]) -> Any:
        if not version.meta.get("virtual"):
            raise ConfigError(
                f"{version.name!r} is a function, which does not store data.\nHint: @virtualobj makes one "
                f"that"
                " does; replace=True puts the data in its place."
            )
        return self._called(version, arguments, data=obj, method="put")

    def drop(self, name: str, *, version: int | str | None = None, force: bool = False) -> builtins.list[int]:
        """Take a dataset away; a virtual one is called before, with `method="drop"`, if it is trusted.

        It stays if its function returns False. See `kindler.shelves.shelf.Shelf.drop`.
        """
        found = self._latest(self._address(name)) if version is None and "@" not in name else None
        if found is not None and found.meta.get("virtual") and self._trusted:
            with contextlib.suppress(Exception) if force else contextlib.nullcontext():
                if self._called(found, {"force": force}, method="drop") is False:
                    return []
        return super().drop(name, version=version, force=force)

    def get(self, name: str, *, version: Any = None, revision: Any = None, **options: Any) -> Any:
        """`name[a,b]`, `name[a:c]` (both included) and `name[^a]` are columns, `name#rows:start=2,end=4` are
        rows, `name#iterchunks:chunksize=10` is an iterator over pieces, `name{k=v}` calls a stored function.

        A revision is a number from 0, -1 for the newest, a date, or a tag.
        """
        asked = parse_expression(name)
        where, version = self._revision(asked.name, version, revision)
        bare, version = self._which(where, version)
        found = self.metadata(bare, version=version)
        if found.kind == "function" and "local" not in options and not options.get("lazy"):
            return self._called(found, {**asked.arguments, **options})
        if asked.arguments:
            raise ConfigError(f"{name!r}: only a stored function takes {{k=v}}.")
        chosen = asked.chosen(found.meta.get("columns") or ())
        if chosen is not None:
            options["columns"] = chosen
        if asked.operation == "iterchunks":
            return self._chunks(found, asked.options.get("chunksize", 100), options)
        value = super().get(str(found), **options)
        if asked.operation == "rows":
            rows = slice(asked.options.get("start"), asked.options.get("end"))
            return value.iloc[rows] if hasattr(value, "iloc") else value[rows]
        return value

    def _chunks(self, version: Version, size: int, options: dict[str, Any]) -> Iterator[Any]:
        with super().get(str(version), lazy=True, **options) as handle:
            yield from handle.iterate(size)

    def revisions(self, name: str, *, raw: bool = False) -> list[Any]:
        """The revisions of a dataset, oldest first, as names that `get` takes; as versions if `raw`."""
        versions = [found for found in self.versions(name) if MARK in found.attributes]
        return versions if raw else [f"{name}@{i}" for i in range(len(versions))]

    def _revision(self, name: str, version: Any, revision: Any) -> tuple[str, Any]:
        """The version of the store that a revision is."""
        bare, _, said = name.partition("@")
        if is_date(version):
            revision, version = version, None
        wanted = said if revision is None and said and not said.endswith("^") else revision
        if wanted is None or wanted == "latest":
            return (bare, version) if wanted == "latest" else (name, version)
        found = self.revisions(bare, raw=True) if self.exists(bare) else []
        if not found or (isinstance(wanted, str) and wanted in self.tags(bare)):
            return bare, wanted  # not one of revisions, or a tag
        return bare, picked(found, wanted, bare).number

    def _called(
        self, version: Version, arguments: dict[str, Any], *, data: Any = None, method: str = "get"
    ) -> Any:
        function = self._function(version, arguments.pop("trusted", False))
        protocol = {"data": data, "method": method, "meta": version, "store": self}
        taken = inspect.signature(function).parameters.values()
        open_ended = version.meta.get("virtual") and any(p.kind is p.VAR_KEYWORD for p in taken)
        names = {p.name for p in taken if p.kind is not p.VAR_KEYWORD}
        passed = {key: value for key, value in protocol.items() if key in names or open_ended}
        if method == "drop" and not open_ended:
            arguments = {key: value for key, value in arguments.items() if key in names}
        return function(**{**passed, **arguments})

    def _function(self, version: Version, trusted: bool) -> Any:
        handler = self._kinds.handler(version.kind)
        with self.store.files(version) as folder:
            return handler.read(folder, version.meta, trusted=trusted or self._trusted)


class Scripts(_Trusting, shelves.Scripts):
    """Functions."""
