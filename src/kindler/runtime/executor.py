"""Runs tasks in a worker: finds what they name, keeps models in memory, gives results.

How a task came here and how its result goes back is for others.
"""

from __future__ import annotations

import functools
import traceback
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from kindler.errors import ConfigError, UntrustedError
from kindler.models.loaded import LoadedModel, load
from kindler.models.registry import MODEL_KINDS
from kindler.runtime import options, resolve_data, value_codec
from kindler.runtime.messages import REDUCE, WRITES, Task
from kindler.runtime.sandboxed_model import SandboxedModel, can_be_sandboxed
from kindler.shelves.datasets import Datasets
from kindler.shelves.models import Models
from kindler.shelves.shelf import Scripts
from kindler.store import Store, Version


class Executor:
    """What a worker process does.

    Args:
        url: The store.
        capacity: How many models stay in memory; the one that was not used for longest goes first.
        trusted: Whether tasks that ask for it may run code and pickles of the store, and have options that
            name files and settings.
    """

    def __init__(self, url: str, *, capacity: int = 4, trusted: bool = True) -> None:
        self._url = url
        self._capacity = capacity
        self._trusted = trusted
        self._store: Store | None = None
        self._resident: OrderedDict[tuple[str, str, int, bool], LoadedModel | SandboxedModel] = OrderedDict()
        self.loads = 0

    def run(self, task: Task) -> Any:
        """The task's result, of any kind; whatever goes wrong is raised.

        Raises:
            UntrustedError: It needs code of the store, or has options that name files or settings, and the
                task or this worker does not allow that.
        """
        refused = task.trusted and not self._trusted
        if refused:
            task = replace(task, trusted=False)
        args, given = self._arguments(task)
        if not task.trusted and task.shelf == "models":
            options.check(str(task), given)
        try:
            result = (self._script if task.shelf == "scripts" else self._model)(task, args, given)
        except UntrustedError as exc:
            if not refused:
                raise
            raise UntrustedError(
                what=f"the task {task}",
                reason="this worker runs no code of the store; `kindler worker --trusted` does",
            ) from exc
        if task.callback is not None:
            self._call_back(task, result)
        return result

    def _script(self, task: Task, args: list[Any], options: dict[str, Any]) -> Any:
        shelf = Scripts(self._open(), task.bucket)
        script = self._kept(shelf.metadata(task.name), trusted=task.trusted)
        assert isinstance(script, LoadedModel)
        result = script.model(*args, **options)
        if isinstance(result, Exception):  # omega|ml's way to fail
            raise result
        return result

    def _model(self, task: Task, args: list[Any], options: dict[str, Any]) -> Any:
        models = Models(self._open(), task.bucket)
        version = models.metadata(task.name)
        spark = _spark_session(options) if task.verb in WRITES else None
        datasets = Datasets(self._open(), task.bucket)
        given = tuple(
            one
            if task.verb == REDUCE
            else resolve_data.read(one, datasets, trusted=task.trusted, spark=spark)
            for one in args
            if one is not None
        )
        if not given:
            raise ConfigError(f"{task.verb}() of {version} needs data, or the name of a dataset.")
        if task.verb in WRITES:
            return _train(models, version, task, given, options)
        return self._kept(version, trusted=task.trusted).call(task.verb, *given, **options)

    def _arguments(self, task: Task) -> tuple[list[Any], dict[str, Any]]:
        args, options = value_codec.decode(task.arguments, task.buffers)
        if not isinstance(args, list) or not isinstance(options, dict):
            raise ConfigError("a task's arguments are a list and a dict.")
        return args, options

    def _kept(self, version: Version, *, trusted: bool) -> LoadedModel | SandboxedModel:
        key = (version.shelf, f"{version.bucket}/{version.name}", version.number, trusted)
        kept = self._resident.get(key)
        if kept is None or (isinstance(kept, SandboxedModel) and kept.is_gone):
            self._resident[key] = self._loaded(version, trusted=trusted)
            self.loads += 1
        self._resident.move_to_end(key)
        while len(self._resident) > self._capacity:
            _, oldest = self._resident.popitem(last=False)
            if isinstance(oldest, SandboxedModel):
                oldest.close()
        return self._resident[key]

    def _loaded(self, version: Version, *, trusted: bool) -> LoadedModel | SandboxedModel:
        unsafe = not self._trusted and not trusted and version.shelf == "models"
        if unsafe and can_be_sandboxed(version):
            return self._sandboxed(version)
        try:
            return load(self._open(), version, trusted=trusted)
        except UntrustedError:
            # Of kinds that may be read here, some models may be read by a sandboxed process alone.
            row = MODEL_KINDS.row(version.kind, version.meta)
            if version.shelf != "models" or trusted or row.needs_sandbox or not can_be_sandboxed(version):
                raise
        return self._sandboxed(version)

    def _sandboxed(self, version: Version) -> SandboxedModel:
        with self._open().files(version) as folder:
            return SandboxedModel(version, folder)

    def _call_back(self, task: Task, result: Any) -> None:
        """The task has its result, whatever its callback does."""
        try:
            Scripts(self._open(), task.bucket).get(str(task.callback), trusted=task.trusted)(result)
        except Exception:  # noqa: BLE001 - code of the user's: what it raised is in the task's log
            traceback.print_exc()

    def _open(self) -> Store:
        if self._store is None:
            self._store = Store.open(self._url)
        return self._store


def _spark_session(options: dict[str, Any]) -> Any:
    """The Spark session of a fit with `engine="spark"`, else None; removes `spark`, a dict of arguments for
    `kindler.init`, from the options."""
    arguments = options.pop("spark", None)
    if options.get("engine") != "spark":
        if arguments is not None:
            raise ConfigError("fit(spark=...) goes with engine='spark'.")
        return None
    from kindler.spark.session import init

    return init(**(arguments or {}))


def _train(
    models: Models, version: Version, task: Task, data: tuple[Any, ...], options: dict[str, Any]
) -> Version:
    """Train a version, as its kind does, and publish the result as the newest one."""
    kind = MODEL_KINDS.model_kind(version.kind)
    read = functools.partial(models.get, str(version), trusted=task.trusted)
    model, attributes = kind.train(read, version.meta, task.verb, data, options)
    return models.put(
        model,
        version.name,
        attributes={**version.attributes, **attributes},
        trusted=task.trusted,
        **kind.put_again(version.meta),
    )
