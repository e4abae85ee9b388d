"""The interfaces of a kind of stored object, and of a kind of model.

`Handler` is what the store needs of any object. `ModelKind` adds what the runtime, the server, MLflow and the
command line need of a model; all of them use the one table in `registry.py`.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from kindler.errors import ConfigError, UntrustedError
from kindler.models.predictor import Predictor
from kindler.store import File, Version, VersionStore
from kindler.store.names import check_path

Meta: TypeAlias = Mapping[str, Any]
Reader: TypeAlias = Callable[..., Any]
Data: TypeAlias = tuple[Any, ...]
Trained: TypeAlias = tuple[Any, dict[str, Any]]


class Handler:
    """Turns objects of one kind into files, and the files back into objects.

    Without `trusted`, neither direction runs code that came with the object or the files.

    Attributes:
        kind: Its name in the catalog.
        put_options: The arguments of `put` that it accepts in addition to those of all kinds.
        get_options: The same of `get`.
        takes_any: Whether it accepts all other arguments of `get` as well.
    """

    kind: ClassVar[str]
    put_options: ClassVar[frozenset[str]] = frozenset()
    get_options: ClassVar[frozenset[str]] = frozenset()
    takes_any: ClassVar[bool] = False

    def can(self, obj: Any) -> bool:
        """Whether the object is of this kind."""
        raise NotImplementedError

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        """Write the object's files into an empty folder; returns what `read` needs, as JSON values."""
        raise NotImplementedError

    def read(self, folder: Path, meta: Meta, *, trusted: bool, **options: Any) -> Any:
        """Read the object again. The folder is removed afterwards, and must not be modified.

        Files and `meta` may come from anyone who can write to the store: unless `trusted`, raise
        `UntrustedError` for everything that could run their code.
        """
        raise NotImplementedError

    def belongs(self, obj: Any, version: Version) -> None:
        """Called with an object that was stored as, or read from, a version."""

    def write_blobs(self, obj: Any, store: VersionStore) -> tuple[list[File], dict[str, Any]] | None:
        """Write blobs elsewhere, as Spark's tasks do; None if `write` should write files here."""
        return None

    def read_blobs(self, version: Version, store: VersionStore, options: Mapping[str, Any]) -> Any:
        """Read blobs elsewhere, as a Spark DataFrame does; None if `read` should read files here."""
        return None


class ModelKind(Handler):
    """One kind of model. A new kind implements `can`, `write`, `read` and `predictor`; the rest has defaults.

    Attributes:
        needs_trust: Whether models of this kind are always code: no `read` without `trusted`.
        verbs: The runtime verbs of its models, in addition to training; None means any.
        packages: The distributions that reading it requires, in addition to Kindler.
        device: Where its models run, "cpu" or "cuda", once `settle` has chosen; None leaves it to the
            framework.
    """

    device: str | None = None
    needs_trust: ClassVar[bool] = False
    verbs: ClassVar[tuple[str, ...] | None] = ("predict",)
    packages: ClassVar[tuple[str, ...]] = ()

    def predictor(self, model: Any) -> Predictor:
        """Make a model that `read` returned ready to predict: arrays by name in, arrays by name out.

        Raises:
            ConfigError: The model cannot predict.
        """
        raise NotImplementedError

    def settle(self, device: str, meta: Meta) -> None:
        """Choose where the models that this object reads will run: "auto", "cpu" or "cuda".

        Called before `read`. The process sees at most one GPU, and chooses once for all of its models.

        Raises:
            ConfigError: "cuda" was requested, and `gpu_problem` returned a reason.
        """
        problem = None if device == "cpu" else self.gpu_problem(meta)
        if device == "cuda" and problem is not None:
            raise ConfigError(f"device 'cuda' was requested; {problem}")
        self.device = "cpu" if device == "cpu" or problem is not None else "cuda"

    def gpu_problem(self, meta: Meta) -> str | None:
        """Why its models cannot compute on a GPU that this process sees; None if they can."""
        return f"models of kind {self.kind!r} compute on the CPU."

    def device_bytes(self, meta: Meta) -> int:
        """The GPU memory that this process uses, as the framework reports it; 0 if it does not."""
        return 0

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        """Run a runtime verb on data that a user sent: arrays, tables, or arrays by name.

        Args:
            loaded: The model; it stays in memory between calls.
            verb: One of `verbs`.
            *data: The data, and for `score` the labels.
            **options: Arguments of the model's own method.
        """
        reject_unknown(options, frozenset(), what=f"{verb} of kind {self.kind!r}")
        return loaded.predictor(*data, method=verb)

    def train(self, read: Reader, meta: Meta, verb: str, data: Data, options: dict[str, Any]) -> Trained:
        """Train a model.

        Args:
            read: Reads the model, with arguments of `get`.
            meta: What `write` returned for it.
            verb: "fit" or "partial_fit".
            data: The data, and the labels if they are separate.
            options: The other arguments of the verb.

        Returns:
            The trained model, and attributes for its version.

        Raises:
            ConfigError: Models of this kind cannot be trained, or not with these arguments.
        """
        raise ConfigError(f"models of kind {self.kind!r} cannot be trained by the runtime.")

    def put_again(self, meta: Meta) -> dict[str, Any]:
        """The arguments that `put` needs to store a trained model as its earlier version was stored."""
        return {}

    def requirements(self, meta: Meta) -> tuple[str, ...]:
        """The distributions that reading a stored model requires; called after it was loaded."""
        return self.packages


class LoadedModel:
    """A model in memory.

    Attributes:
        kind: What its kind can do.
        model: The model, as `read` of its kind returned it.
    """

    def __init__(self, kind: ModelKind, model: Any) -> None:
        self.kind, self.model = kind, model

    @cached_property
    def predictor(self) -> Predictor:
        """The model, ready to predict. Created on first use: the model's own verbs do not need it."""
        return self.kind.predictor(self.model)

    def call(self, verb: str, /, *data: Any, **options: Any) -> Any:
        """Run a verb of the runtime.

        Raises:
            ConfigError: Models of this kind do not have it.
        """
        verbs = self.kind.verbs
        if verbs is not None and verb not in verbs:
            raise ConfigError(
                f"models of kind {self.kind.kind!r} have no {verb}; they have {', '.join(verbs)}."
            )
        return self.kind.call(self, verb, *data, **options)


class OwnMethods(ModelKind):
    """A kind whose models have the verbs as methods, `fit` and `partial_fit` among them."""

    verbs = ("predict", "predict_proba", "decision_function", "score", "transform")

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        return _method(loaded.model, verb)(*data, **options)

    def train(self, read: Reader, meta: Meta, verb: str, data: Data, options: dict[str, Any]) -> Trained:
        model = read()
        _method(model, verb)(*data, **options)
        return model, {}


def _method(model: Any, verb: str) -> Any:
    method = getattr(model, verb, None)
    if not callable(method):
        raise ConfigError(f"a {type(model).__qualname__} has no {verb}.")
    return method


def confined(folder: Path, name: object) -> Path:
    """The file of a version that its metadata names."""
    path = folder / check_path(name)
    if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"the version has no file {name!r}.")
    return path


def reject_unknown(options: Mapping[str, Any], known: frozenset[str], *, what: str) -> None:
    """Reject unknown options."""
    unknown = sorted(set(options) - known)
    if unknown:
        supported = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise ConfigError(f"{what}: unexpected option {', '.join(unknown)}; {supported}.")


def import_path(obj: Any) -> str | None:
    """The path that imports a function or class elsewhere, as "module:name"; None if there is none."""
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if module in (None, "__main__", "builtins") or name is None or "<" in name:
        return None
    there: Any = sys.modules.get(module)
    for part in name.split("."):
        there = getattr(there, part, None)
    return f"{module}:{name}" if there is obj else None


def import_object(path: str, *, what: str) -> Any:
    """What `import_path` named; runs the code of its module."""
    try:
        return pkgutil.resolve_name(path)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # code of the module's: it may also call sys.exit
        raise ConfigError(f"{what} {path!r} cannot be imported here: {exc!r}.") from exc


def require_trust(trusted: bool, *, what: str, reason: str) -> None:
    """Raise `UntrustedError` for what could run foreign code, unless the caller trusts it."""
    if not trusted:
        raise UntrustedError(what=what, reason=reason)
