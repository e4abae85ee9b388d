"""`MLflowLogger`: logs `fit` as an MLflow run, from the driver; see `train/driver_callbacks.py`.

An unusable server is an error before workers start. After that, no problem with it stops the training: a
thread writes the metrics (`Journal`), and a warning says what could not be written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kindler.errors import TrackingError, first_line
from kindler.registry import imported
from kindler.tracking import package_version
from kindler.train.callbacks import DriverCallback, RunStatus

_log = logging.getLogger(__name__)

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_NOT_METRICS = {"epoch", "steps", "num_samples", "val_num_samples"}
_PARAMS_AT_ONCE = 100
_LONGEST_PARAM, _LONGEST_TAG = 500, 5000
_FLUSH_S = {"finished": 30.0, "failed": 10.0, "killed": 5.0}
# Defaults, unless the user set them: MLflow would retry an unreachable server for minutes.
_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}


class MLflowLogger(DriverCallback):
    """Logs a run to MLflow: its parameters, its metrics after each epoch, its final status, and the model.

    Pass it in the `callbacks` of `fit`, for PyTorch and Keras alike. A run that loses workers continues as
    the same MLflow run, and no metric is logged twice.

    Args:
        tracking_uri: The tracking server (`http://host:5000`), or any other URI that MLflow accepts; None
            uses MLflow's default, such as `MLFLOW_TRACKING_URI`.
        experiment: The experiment's name; it is created if it does not exist. None uses MLflow's default,
            such as `MLFLOW_EXPERIMENT_NAME`.
        run_name: The name of the run; None lets MLflow choose.
        run_id: A run to continue, as with `fit(resume=True)`; epochs that it has are not logged again. None
            creates a new run, or uses the one that `mlflow.start_run` opened in this process and leaves it
            open.
        tags: Tags of the run.
        log_model: Log the trained model as an MLflow model, with its signature, when the run has finished.
        model_name: The name of the model in the run.
        registered_model: A name in MLflow's registry; the model becomes its newest version.
        model_options: Options of `store.models.put` for this model: `{"init": {...}}` for your own PyTorch
            class, `{"trusted": True}`.

    Attributes:
        run_id: The id of the MLflow run; None before the first `fit`.
        model_uri: The logged model's URI for `mlflow.pyfunc.load_model`, or None.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        *,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        log_model: bool = True,
        model_name: str = "model",
        registered_model: str | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self.run_name = run_name
        self.run_id = run_id
        self.tags = dict(tags or {})
        self.log_model = log_model or registered_model is not None
        self.model_name = model_name
        self.registered_model = registered_model
        self.model_options = dict(model_options or {})
        self.model_uri: str | None = None
        self._initial_run = run_id
        self._run: _TrackedRun | None = None
        self._rejected: str | None = None

    def on_run_begin(self, params: Mapping[str, Any]) -> None:
        """Open the run and log its parameters.

        Raises:
            MissingExtraError: mlflow is not installed.
            TrackingError: The server cannot be used.
        """
        mlflow = _library()
        uri = self.tracking_uri or mlflow.get_tracking_uri()
        self.model_uri = None
        try:
            with _short_timeouts():
                self._run = self._opened(mlflow, uri)
                self._run.log_params(params)
                self._run.set_tags({**_system(params), **self.tags})
        except (mlflow.exceptions.MlflowException, OSError, ImportError) as exc:
            run, self._run = self._run, None
            if run is not None:
                with suppress(Exception):
                    run.end("FAILED")
            hint = "is the tracking server running, and is tracking_uri (or MLFLOW_TRACKING_URI) correct?"
            if isinstance(exc, ImportError):
                hint = "a database or a folder as tracking_uri needs the full package: pip install mlflow."
            reason = first_line(exc, 500).replace(uri, _bare(uri))
            raise TrackingError(
                f"MLflow at {_bare(uri)} cannot be used: {reason}\nHint: {hint}", uri=_bare(uri)
            ) from exc
        self.run_id = self._run.id
        self._joined, self._rejected = 0, None
        self._journal = Journal(f"MLflow at {_bare(uri)}")

    def on_workers_ready(self, workers: int) -> None:
        """Log the number of workers, and later how often they were restarted."""
        run = self._run
        if run is None:
            return
        restarts, self._joined = self._joined, self._joined + 1
        if not restarts:
            self._write(lambda: run.log_params({"workers": workers}))
        else:
            self._write(lambda: run.set_tags({"kindler.restarts": str(restarts)}))

    def on_epoch_end(self, logs: Mapping[str, Any]) -> None:
        """Log the metrics of the epoch."""
        run, now = self._run, int(time.time() * 1000)
        if run is not None:
            self._write(lambda: run.log_metrics(logs, now))

    def on_run_end(self, status: RunStatus, error: BaseException | None, estimator: Any) -> None:
        """Log the final status, the history, and the model if requested."""
        run, self._run = self._run, None
        if run is None:
            return
        unwritten = self._journal.close(_FLUSH_S[status])
        if unwritten:
            warnings.warn(
                f"MLflow could not be reached: run {run.id} lacks its last {unwritten} entries"
                " and its final status.",
                stacklevel=2,
            )
            return
        if self._rejected is not None:
            warnings.warn(f"MLflow rejected some entries of run {run.id}: {self._rejected}", stacklevel=2)
        try:
            with _short_timeouts():
                try:
                    if error is not None:
                        message = str(error) or type(error).__qualname__
                        run.set_tags({"kindler.error": message[:_LONGEST_TAG]})
                    if status == "finished":
                        run.log_history(estimator.history)
                        run.log_lineage(estimator.lineage)
                        if self.log_model:
                            self.model_uri = self._logged(run, estimator)
                finally:
                    run.end(_STATUS[status])
        except Exception as exc:  # noqa: BLE001  the trained model must not be lost over this
            warnings.warn(f"MLflow run {run.id} is incomplete: {first_line(exc, 500)}", stacklevel=2)

    def _write(self, entry: Callable[[], None]) -> None:
        """Queue an entry; one that the server rejects would be rejected again, so it is dropped."""

        def unless_rejected() -> None:
            try:
                entry()
            except _library().exceptions.MlflowException as exc:
                if not 400 <= exc.get_http_status_code() < 429:
                    raise
                self._rejected = self._rejected or first_line(exc, 500)

        self._journal.add(unless_rejected)

    def _logged(self, run: _TrackedRun, estimator: Any) -> str:
        from kindler.models.kind import reject_unknown
        from kindler.models.registry import MODEL_KINDS
        from kindler.store import Address, Version
        from kindler.store.versions import files_in
        from kindler.tracking import models

        options = dict(self.model_options)
        trusted = options.pop("trusted", False) is True
        kind = MODEL_KINDS.taking(estimator, "models", options.pop("kind", None))
        reject_unknown(options, kind.put_options, what="model_options")
        with tempfile.TemporaryDirectory(prefix="kindler-mlflow-") as scratch:
            files, folder = Path(scratch) / "files", Path(scratch) / "model"
            files.mkdir()
            meta = kind.write(estimator, files, trusted=trusted, **options)
            address = Address("default", "models", "model")
            version = Version.draft(
                address, kind=kind.kind, files=list(files_in(files)), meta=meta, attributes={}
            )

            def write(**fields: Any) -> Path:
                models.write(version, files, folder, trusted=trusted, **fields)
                return folder

            return run.log_model(self.model_name, write, self.registered_model)

    def _opened(self, mlflow: Any, uri: str) -> _TrackedRun:
        client = mlflow.MlflowClient(tracking_uri=uri)
        active = mlflow.active_run() if self._initial_run is None and self.tracking_uri is None else None
        known = self._initial_run or (active.info.run_id if active is not None else None)
        if known is not None:
            run = _TrackedRun(client, client.get_run(known), owned=active is None)
            if run.owned:
                client.update_run(known, status="RUNNING")
            return run
        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        if name := self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME"):
            experiment = client.get_experiment_by_name(name)
            experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
        # MLflow's own tags: user, source and so on.
        context = import_module("mlflow.tracking.context.registry").resolve_tags()
        new_run = client.create_run(experiment_id, tags=context, run_name=self.run_name)
        return _TrackedRun(client, new_run, owned=True)


class _TrackedRun:
    """One MLflow run; `owned` if its final status is set here."""

    def __init__(self, client: Any, run: Any, *, owned: bool) -> None:
        self._client = client
        self._entities = import_module("mlflow.entities")
        self.id = str(run.info.run_id)
        self.owned = owned
        self._experiment_id = run.info.experiment_id
        self._params = set(run.data.params)
        losses = client.get_metric_history(self.id, "loss") if run.data.metrics else []
        self._epoch = max((metric.step for metric in losses), default=0)

    def log_params(self, facts: Mapping[str, Any]) -> None:
        """Log new parameters; MLflow does not allow changing one."""
        new = [
            self._entities.Param(_key(name), str(value)[:_LONGEST_PARAM])
            for name, value in facts.items()
            if name not in self._params
        ]
        for first in range(0, len(new), _PARAMS_AT_ONCE):
            self._client.log_batch(self.id, params=new[first : first + _PARAMS_AT_ONCE])
        self._params |= set(facts)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        entries = [self._entities.RunTag(_key(name), str(value)) for name, value in tags.items()]
        self._client.log_batch(self.id, tags=entries)

    def log_metrics(self, row: Mapping[str, Any], timestamp: int) -> None:
        """Log the metrics of an epoch, with the epoch as the step, once."""
        epoch = int(row["epoch"])
        if epoch <= self._epoch:
            return
        metrics = [
            self._entities.Metric(_key(name), float(value), timestamp, epoch)
            for name, value in row.items()
            if name not in _NOT_METRICS and isinstance(value, int | float)
        ]
        self._client.log_batch(self.id, metrics=metrics)
        self._epoch = epoch

    def log_history(self, history: Any) -> None:
        """Log the epochs as a file, and the goodput as metrics."""
        self._client.log_dict(self.id, {"epochs": [dict(row) for row in history]}, "history.json")
        values, now = history.goodput.scalars(), int(time.time() * 1000)
        metrics = [self._entities.Metric(_key(name), s, now, self._epoch) for name, s in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def log_lineage(self, fits: Sequence[Mapping[str, Any]]) -> None:
        """Log what made the model as a file, the data of the last fit as inputs, and the commit as a tag."""
        if not fits:
            return
        self._client.log_dict(self.id, {"fits": list(fits)}, "lineage.json")
        made = [
            self._entities.DatasetInput(
                self._entities.Dataset(**_dataset(fits[-1], side)),
                [self._entities.InputTag("mlflow.data.context", context)],
            )
            for side, context in (("data", "training"), ("validation", "validation"))
            if side in fits[-1]
        ]
        self._client.log_inputs(self.id, datasets=made)
        commits = [code["commit"] for code in fits[-1].get("code", ()) if "commit" in code]
        if commits:
            self.set_tags({"mlflow.source.git.commit": commits[0]})

    def log_model(self, name: str, write: Callable[..., Path], registered: str | None) -> str:
        """Log the model that `write` writes to a folder, with fields of its `MLmodel`; returns its URI."""
        client = self._client
        model = client.create_logged_model(self._experiment_id, name=name, source_run_id=self.id)
        try:
            folder = write(run_id=self.id, model_id=model.model_id)
            client.log_model_artifacts(model.model_id, str(folder))
        except BaseException:
            client.finalize_logged_model(model.model_id, "FAILED")
            raise
        client.finalize_logged_model(model.model_id, "READY")
        client.log_outputs(self.id, [self._entities.LoggedModelOutput(model.model_id, step=self._epoch)])
        uri = f"models:/{model.model_id}"
        if registered is not None:
            if not client.search_registered_models(f"name = '{registered}'"):
                client.create_registered_model(registered)
            client.create_model_version(registered, uri, run_id=self.id, model_id=model.model_id)
        return uri

    def end(self, status: str) -> None:
        if self.owned:
            self._client.set_terminated(self.id, status)


class Journal:
    """Writes entries in order on a thread of its own, so that the caller never waits.

    If the server `name` cannot be reached, entries are kept and retried with the next one; only one warning
    is logged.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._entries: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._closing = self._warned = False
        # A daemon: a server that does not answer must not keep the process.
        self._thread = threading.Thread(target=self._run, name="kindler-journal", daemon=True)
        self._thread.start()

    def add(self, entry: Callable[[], None]) -> None:
        """Queue an entry behind the others."""
        self._entries.append(entry)
        self._wake.set()

    def close(self, timeout_s: float) -> int:
        """Wait until all entries are written or the timeout is over; returns how many are left."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        return len(self._entries)

    def _run(self) -> None:
        last = False
        while not last:
            self._wake.wait()  # after a failure, until a new entry arrives
            self._wake.clear()
            last = self._closing
            try:
                while self._entries:
                    self._entries[0]()
                    self._entries.popleft()
            except Exception as exc:  # noqa: BLE001  whatever it is, the run must go on
                if not self._warned:
                    _log.warning("cannot write to %s; training continues: %s", self._name, first_line(exc))
                self._warned = True


def _library() -> Any:
    return imported("mlflow", what="MLflowLogger", package="mlflow", extra="mlflow")


@contextmanager
def _short_timeouts() -> Iterator[None]:
    """Short timeouts for MLflow's requests, which it reads from the environment each time."""
    ours = {name: value for name, value in _TIMEOUTS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _dataset(fit: Mapping[str, Any], side: str) -> dict[str, str]:
    """The data of a fit in the words of MLflow's datasets."""
    data = fit[side]
    paths = data.get("paths") or [file["path"] for file in data.get("files", ())]
    hashes = [file.get("sha256") for file in data.get("files", ())]
    known = fit.get("fingerprint") if side == "data" else None
    digest = known or hashlib.sha256(json.dumps([hashes, paths]).encode()).hexdigest()
    profile = {"num_rows": fit.get("rows") if side == "data" else None, "files": data.get("file_count")}
    return {
        "name": (Path(urlsplit(paths[0]).path).name if paths else data["kind"]) or side,
        "digest": digest[:32],
        "source_type": (urlsplit(paths[0]).scheme or "local").replace("file", "local") if paths else "code",
        "source": json.dumps({"uri": paths[0]} if paths else {"tags": {"kind": data["kind"]}}),
        "profile": json.dumps({name: value for name, value in profile.items() if value is not None}),
    }


def _system(facts: Mapping[str, Any]) -> dict[str, str]:
    packages = {"kindler", str(facts.get("framework", "")), str(facts.get("backend", ""))} - {""}
    versions = {f"kindler.version.{name}": package_version(name) for name in sorted(packages)}
    return {
        "kindler.host": socket.gethostname(),
        "kindler.platform": platform.platform(),
        "kindler.python": sys.version.split()[0],
        "kindler.cpus": str(os.cpu_count()),
        **{name: version for name, version in versions.items() if version},
    }


def _bare(uri: str) -> str:
    """The URI without a password in it."""
    scheme, parted, rest = uri.partition("://")
    return f"{scheme}{parted}{rest.rpartition('@')[2]}" if parted else uri


def _key(name: str) -> str:
    """A name that MLflow accepts: letters, digits, `_ - . : /` and spaces."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)[:250]
