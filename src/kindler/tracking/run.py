"""One MLflow run, and the thread that writes to it. `logger.py` decides what is written and when."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kindler.errors import first_line

_log = logging.getLogger(__name__)

_NOT_METRICS = {"epoch", "steps", "num_samples", "val_num_samples"}
_PARAMS_AT_ONCE = 100
_LONGEST_PARAM = 500


class TrackedRun:
    """One MLflow run.

    Args:
        client: MLflow's client.
        run: MLflow's run.
        owned: Whether this class sets its final status.
    """

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
        """Set tags; each may be set again."""
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

    def log_history(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the history as a JSON file."""
        self._client.log_dict(self.id, {"epochs": [dict(row) for row in rows]}, "history.json")

    def log_model(self, name: str, write: Callable[..., Path], registered: str | None) -> str:
        """Log the model as an MLflow model, and return its URI.

        Args:
            name: Its name.
            write: Writes it to a folder; takes fields of the `MLmodel` file.
            registered: A name in the registry; the model becomes its newest version.
        """
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
        """Set the final status, if the run is owned."""
        if self.owned:
            self._client.set_terminated(self.id, status)


class Journal:
    """Writes entries in order on a thread of its own, so that the caller never waits.

    If the server cannot be reached, entries are kept and retried with the next one, with a single warning.

    Args:
        name: The destination, for the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._entries: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._news = self._closing = self._warned = False
        self._thread = threading.Thread(target=self._run, name="kindler-journal", daemon=True)
        self._thread.start()

    def add(self, entry: Callable[[], None]) -> None:
        """Queue an entry behind the others."""
        with self._wake:
            self._entries.append(entry)
            self._news = True
            self._wake.notify()

    def close(self, timeout_s: float) -> int:
        """Wait until all entries are written or the timeout is over; returns how many are left."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        with self._wake:
            return len(self._entries)

    def _run(self) -> None:
        last = False
        while not last:
            with self._wake:
                # After a failure, retry only when a new entry arrives.
                self._wake.wait_for(lambda: self._news or self._closing)
                self._news, last = False, self._closing
                waiting = list(self._entries)
            self._write(waiting)

    def _write(self, waiting: list[Callable[[], None]]) -> None:
        for entry in waiting:
            try:
                entry()
            except Exception as exc:  # noqa: BLE001  whatever it is, the run must go on
                if not self._warned:
                    _log.warning("cannot write to %s; training continues: %s", self._name, first_line(exc))
                self._warned = True
                return
            with self._wake:
                self._entries.popleft()


def _key(name: str) -> str:
    """A name that MLflow accepts: letters, digits, `_ - . : /` and spaces."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)[:250]
