"""`MLflowLogger`: logs `fit` as an MLflow run, from the driver; see `train/driver_callbacks.py`.

An unusable server is an error before workers start. After that, no problem with it stops the training: a
thread writes the metrics (`run.Journal`), and a warning says what could not be written.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from kindler.errors import MissingExtraError, TrackingError, first_line
from kindler.tracking.run import Journal, TrackedRun
from kindler.train.callbacks import DriverCallback, RunStatus

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_LONGEST_TAG = 5000
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
        model_options: Options of `om.models.put` for this model: `{"init": {...}}` for your own PyTorch
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
        self._run: TrackedRun | None = None
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
            reason = _first(exc).replace(uri, _bare(uri))
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
            self._complete(run, status, error, estimator)
        except Exception as exc:  # noqa: BLE001  the trained model must not be lost over this
            warnings.warn(f"MLflow run {run.id} is incomplete: {_first(exc)}", stacklevel=2)

    def _write(self, entry: Callable[[], None]) -> None:
        """Queue an entry; one that the server rejects would be rejected again, so it is dropped."""

        def unless_rejected() -> None:
            try:
                entry()
            except _library().exceptions.MlflowException as exc:
                if not 400 <= exc.get_http_status_code() < 429:
                    raise
                self._rejected = self._rejected or _first(exc)

        self._journal.add(unless_rejected)

    def _complete(
        self, run: TrackedRun, status: RunStatus, error: BaseException | None, estimator: Any
    ) -> None:
        with _short_timeouts():
            try:
                if error is not None:
                    message = str(error) or type(error).__qualname__
                    run.set_tags({"kindler.error": message[:_LONGEST_TAG]})
                if status == "finished":
                    run.log_history(estimator.history)
                    if self.log_model:
                        self.model_uri = self._logged(run, estimator)
            finally:
                run.end(_STATUS[status])

    def _logged(self, run: TrackedRun, estimator: Any) -> str:
        from kindler.models.kind import known_only
        from kindler.models.registry import MODEL_KINDS
        from kindler.store import Address, Store
        from kindler.tracking import models

        options = dict(self.model_options)
        with tempfile.TemporaryDirectory(prefix="kindler-mlflow-") as folder:
            store = Store.open(Path(folder) / "store")
            try:
                trusted = options.pop("trusted", False) is True
                kind = MODEL_KINDS.taking(estimator, "models", options.pop("kind", None))
                known_only(options, kind.put_options, what="model_options")
                with store.stage() as staged:
                    meta = kind.write(estimator, staged, trusted=trusted, **options)
                    address = Address("default", "models", "model")
                    version = store.publish(address, staged, kind=kind.kind, meta=meta)

                def write(**fields: Any) -> Path:
                    return models.write(store, version, Path(folder) / "model", trusted=trusted, **fields)

                return run.log_model(self.model_name, write, self.registered_model)
            finally:
                store.close()

    def _opened(self, mlflow: Any, uri: str) -> TrackedRun:
        client = mlflow.MlflowClient(tracking_uri=uri)
        active = mlflow.active_run() if self._initial_run is None and self.tracking_uri is None else None
        known = self._initial_run or (active.info.run_id if active is not None else None)
        if known is not None:
            run = TrackedRun(client, client.get_run(known), owned=active is None)
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
        return TrackedRun(client, new_run, owned=True)


def _library() -> Any:
    try:
        import_module("mlflow.exceptions")
        return import_module("mlflow")
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "mlflow":
            raise
        raise MissingExtraError(what="MLflowLogger", package="mlflow", extra="mlflow") from exc


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


def _system(facts: Mapping[str, Any]) -> dict[str, str]:
    packages = {"kindler", str(facts.get("framework", "")), str(facts.get("backend", ""))} - {""}
    versions = {f"kindler.version.{name}": _version(name) for name in sorted(packages)}
    return {
        "kindler.host": socket.gethostname(),
        "kindler.platform": platform.platform(),
        "kindler.python": sys.version.split()[0],
        "kindler.cpus": str(os.cpu_count()),
        **{name: version for name, version in versions.items() if version},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _bare(uri: str) -> str:
    """The URI without a password in it."""
    scheme, parted, rest = uri.partition("://")
    return f"{scheme}{parted}{rest.rpartition('@')[2]}" if parted else uri


def _first(error: BaseException) -> str:
    return first_line(error, 500)
