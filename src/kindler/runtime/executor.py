"""The process that runs tasks: finds what they name, keeps models in memory, gives results.

It is forked by `local.py` and gets tasks over the socket that it was forked with. It ends when it has been
idle for a while, when the other side closes the connection, and with its owner.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import socket
import traceback
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kindler.engine.placement import enter_program_path
from kindler.engine.wire import Channel
from kindler.errors import ConfigError, DataError, UntrustedError
from kindler.frame import ChannelClosed
from kindler.models.loaded import LoadedModel, load
from kindler.models.registry import MODEL_KINDS
from kindler.runtime import value_codec
from kindler.runtime.local import Log, send_frame
from kindler.runtime.messages import REDUCE, WRITES, Report, Task
from kindler.runtime.sandboxed_model import Encoded, SandboxedModel, can_be_sandboxed
from kindler.shelves.datasets import Datasets
from kindler.shelves.expressions import parse_expression
from kindler.shelves.models import Models
from kindler.shelves.shelf import Scripts
from kindler.store import Version, VersionStore

# What an untrusted task may pass to a worker. Options reach the model's own methods and, through `Estimator`,
# files, folders and the settings of a Java process. Without trust only those pass that say how to compute,
# and text only where it names a column, a class of the framework or one of a few words; never a path.
# Numbers, booleans, arrays and tables:
_NUMBERS = frozenset(
    (
        *("accumulation_steps", "batch_size", "check_input", "class_weight", "clip_norm", "clip_value"),
        *("coef_init", "copy", "epochs", "initial_epoch", "intercept_init", "lr", "max_steps", "return_cov"),
        *("return_std", "sample_weight", "seed", "shapes", "shuffle", "stack_features", "steps"),
        *("steps_per_epoch", "validation_batch_size", "validation_data", "validation_freq"),
        *("validation_split", "validation_steps", "verbose", "workers"),
    )
)
# The same, and names of columns and classes of data, which may be any text: nothing but data has them.
_COLUMNS = frozenset(
    (
        *("allow_nan", "classes", "dtypes", "feature_cols", "label_cols", "output_cols"),
        *("sample_weight_col", "weight_col"),
    )
)
# The same, and names of devices and of a framework's classes.
_NAMES = frozenset(("device", "keras_backend", "loss", "metrics", "optimizer", "precision"))
_NAME = re.compile(r"[\w.:+ -]{1,200}")
_WORDS: Mapping[str, tuple[Any, ...]] = {"engine": ("auto", "local", "spark")}


def main(sock: socket.socket) -> int:
    """Run tasks until idle; the first message has the store, the limits, and where to write the log."""
    faulthandler.enable()
    channel = Channel(sock)
    try:
        order = channel.receive().fields
        log = Log(Path(order["folder"]))
        log.take_over()
        enter_program_path(order["sys_path"])
        # So that `from kindler import om` in the user's code opens the store that it came from.
        os.environ["KINDLER_STORE"] = order["store"]
        executor = Executor(order["store"], capacity=order["capacity"], trusted=order["trusted"])
        channel.send("ready")
        while True:
            task = Task.read(channel.receive(order["idle_s"]))
            log.begin()
            send_frame(channel, Report("running").frame(task.id))
            send_frame(channel, _reported(executor, task, log).frame(task.id))
    except (ChannelClosed, TimeoutError):
        return 0


def _reported(executor: Executor, task: Task, log: Log) -> Report:
    try:
        result = executor.run(task)
        buffers = result if isinstance(result, Encoded) else value_codec.encode(result)
        size = sum(map(len, buffers))
        if size > task.result_bytes:
            raise DataError(
                f"the result of {task} has {size} bytes, more than result_bytes={task.result_bytes}.\n"
                "Hint: predict fewer rows at a time, or raise runtime.options(result_bytes=...)."
            )
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # noqa: BLE001 - the edge of the worker, also for code that calls sys.exit
        return Report.failed(exc, log=log.tail())
    return Report("done", buffers, log=log.tail())


class Executor:
    """Runs tasks and keeps `capacity` models in memory. A worker that is not `trusted` runs no code of the
    store, whatever a task asks for."""

    def __init__(self, url: str, *, capacity: int = 4, trusted: bool = True) -> None:
        self._url = url
        self._capacity = capacity
        self._trusted = trusted
        self._resident: OrderedDict[tuple[str, str, int, bool], LoadedModel | SandboxedModel] = OrderedDict()
        self.loads = 0

    @functools.cached_property
    def _store(self) -> VersionStore:
        return VersionStore.open(self._url)

    def run(self, task: Task) -> Any:
        """The task's result, of any kind; whatever goes wrong is raised."""
        is_downgraded = task.trusted and not self._trusted
        if is_downgraded:
            task = replace(task, trusted=False)
        args, options = value_codec.decode(task.buffers)
        if not isinstance(args, list) or not isinstance(options, dict):
            raise ConfigError("a task's arguments are a list and a dict.")
        if not task.trusted and task.shelf == "models":
            _check_options(str(task), options)
        try:
            result = (self._script if task.shelf == "scripts" else self._model)(task, args, options)
        except UntrustedError as exc:
            if not is_downgraded:
                raise
            raise UntrustedError(
                what=f"the task {task}",
                reason="this worker does not run code from the store; `kindler worker --trusted` does",
            ) from exc
        if task.callback is not None:
            self._call_back(task, result)
        return result

    def _script(self, task: Task, args: list[Any], options: dict[str, Any]) -> Any:
        shelf = Scripts(self._store, task.bucket)
        script = self._kept(shelf.metadata(task.name), trusted=task.trusted)
        assert isinstance(script, LoadedModel)
        result = script.model(*args, **options)
        if isinstance(result, Exception):  # omega|ml's way to fail
            raise result
        return result

    def _model(self, task: Task, args: list[Any], options: dict[str, Any]) -> Any:
        models = Models(self._store, task.bucket)
        version = models.metadata(task.name)
        spark = _spark_session(options) if task.verb in WRITES else None
        datasets = Datasets(self._store, task.bucket)
        data = tuple(arg for arg in args if arg is not None)
        if task.verb != REDUCE:
            data = tuple(_data(arg, datasets, trusted=task.trusted, spark=spark) for arg in data)
        if not data:
            raise ConfigError(f"{task.verb}() of {version} needs data, or the name of a dataset.")
        if task.verb in WRITES:
            return _train(models, version, task, data, options)
        return self._kept(version, trusted=task.trusted).call(task.verb, *data, **options)

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
            return load(self._store, version, trusted=trusted)
        except UntrustedError:
            # Of kinds that may be read here, some models may be read by a sandboxed process alone.
            row = MODEL_KINDS.row(version.kind, version.meta)
            if version.shelf != "models" or trusted or row.needs_sandbox or not can_be_sandboxed(version):
                raise
        return self._sandboxed(version)

    def _sandboxed(self, version: Version) -> SandboxedModel:
        with self._store.files(version) as folder:
            return SandboxedModel(version, folder)

    def _call_back(self, task: Task, result: Any) -> None:
        """The task has its result, whatever its callback does."""
        try:
            Scripts(self._store, task.bucket).get(str(task.callback), trusted=task.trusted)(result)
        except Exception:  # noqa: BLE001 - code of the user's: what it raised is in the task's log
            traceback.print_exc()


def _spark_session(options: dict[str, Any]) -> Any:
    """The Spark session of a fit with `engine="spark"`, else None; removes `spark`, a dict of arguments for
    `kindler.init`, from the options."""
    arguments = options.pop("spark", None)
    if options.get("engine") != "spark":
        if arguments is not None:
            raise ConfigError("fit(spark=...) requires engine='spark'.")
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


def _data(data: Any, datasets: Datasets, *, trusted: bool, spark: Any = None) -> Any:
    """The data of an argument: itself, or that of the dataset it names.

    `name[a,b]` selects columns of a table, `name[^a]` all others, `name#rows:start=2,end=4` rows; `name{k=v}`
    calls a stored function with arguments. With a session, tables are read as Spark DataFrames.
    """
    if not isinstance(data, str):
        return _not_paths(data)
    expression = parse_expression(data)
    if expression.operation == "iterchunks":
        raise ConfigError(
            f"{data!r}: a task can only read a dataset as a whole.\nHint: datasets.get can read it in pieces."
        )
    version = datasets.metadata(expression.name)
    options: dict[str, Any] = dict(expression.arguments or {})
    if options and version.kind != "function":
        raise ConfigError(
            f"{expression.name!r} is of kind {version.kind!r}; only a stored function takes {{k=v}}."
        )
    if version.kind == "parquet":
        whole = expression.columns is None and expression.operation is None
        if spark is not None:
            options = {"as_": "spark", "spark": spark}
        elif not whole or version.meta.get("made_from") == "spark":
            options = {"as_": "pandas"}
    table = _not_paths(datasets.get(str(version), trusted=trusted, **options))
    chosen = expression.chosen(getattr(table, "columns", ()))
    if spark is not None:
        return table if chosen is None else table.select(*chosen)
    if chosen is not None:
        one = len(chosen) == 1 and expression.columns is not None and expression.columns.strip() == chosen[0]
        table = table[chosen[0]] if one else table[chosen]
    if expression.operation == "rows":
        table = table.iloc[expression.options.get("start") : expression.options.get("end")]
    return table


def _not_paths(value: Any) -> Any:
    """Lists as arrays. Text is an error: an estimator would take it for the path of a local file."""
    if isinstance(value, str | bytes | os.PathLike):
        raise ConfigError(
            "expected arrays or tables, received text.\nHint: pass the name of a dataset that contains them."
        )
    return np.asarray(value) if isinstance(value, list) else value


def _check_options(call: str, options: Mapping[str, Any]) -> None:
    unsafe = sorted(name for name, value in options.items() if not _is_harmless(name, value))
    if unsafe:
        shown = ", ".join(f"{name}=..." for name in unsafe)
        raise UntrustedError(
            what=f"the task {call}",
            reason=f"{shown} could name files or settings, which is allowed only with"
            " runtime.options(trusted=True), on this machine or on workers started with"
            " `kindler worker --trusted`",
        )


def _is_harmless(name: str, value: Any) -> bool:
    if name in _WORDS:
        return value in _WORDS[name]
    if name in _COLUMNS:
        return True
    texts = _texts(value)
    if name in _NAMES:
        return all(isinstance(text, str) and _NAME.fullmatch(text) for text in texts)
    return name in _NUMBERS and not texts


def _texts(value: Any) -> list[str | bytes]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str | bytes) else []
