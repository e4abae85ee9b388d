"""What workers run: their data and replica, what training continues from, and how replicas are joined.

Whether a mid-epoch checkpoint is usable is known only when all workers have opened their data, so the driver
sends candidates, and every worker makes the same choice.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np

from kindler.data.batches import Rows
from kindler.data.statistics import Statistics, Summary, as_predictions, measured, merged, summarised
from kindler.engine.placement import Placement, current_worker, set_current_worker
from kindler.errors import ConfigError
from kindler.frameworks.devices import explained
from kindler.frameworks.registry import FRAMEWORKS
from kindler.group import Group
from kindler.sync.contract import Sync
from kindler.sync.registry import SYNCS, servers_of
from kindler.train import fit_loop, step_loop
from kindler.train.checkpoints import CheckpointWarning, Header, parse
from kindler.train.goodput import Stopwatch
from kindler.train.loop import Loop, Start
from kindler.train.options import Task
from kindler.train.regroup import Regrouper
from kindler.train.rows import open_rows

ENTRY = "kindler.train.run:run"
SERVER_ENTRY = "kindler.train.run:run_server"

_PREDICTED_ROWS = 2048  # of the validation data, if they take no longer than:
_PREDICTING_S, _PREDICTING_SHARE = 0.2, 0.02  # of the run


def run(worker: Group, task_bytes: bytes, spec: bytes, *states: bytes) -> Sequence[bytes]:
    """Train or evaluate; rank 0 returns the history (or metrics) as JSON, and the model's state.

    Of a run that moves it returns a checkpoint instead, or nothing if that is in the folder.

    `states` is the model's state (empty for a new one), then checkpoints to continue from, best first.
    """
    stopwatch = Stopwatch()
    predictions: Mapping[str, Summary] = {}
    task: Task = cloudpickle.loads(task_bytes)
    follows = FRAMEWORKS.spec(task.framework).loop == "fit"
    placed = worker.place(task.config.device, share=task.config.share_gpus)
    with explained(), _process_group(worker, task, placed), ExitStack() as opened:

        def open_data(source: Any, what: str, *, trains: bool) -> Rows:
            stopwatch.lap("start")
            rows = open_rows(worker, task, source, what, trains=trains, numbered=follows)
            stopwatch.lap("ingest")
            return opened.enter_context(closing(rows))

        if follows:
            # TensorFlow, for one, keeps generated code in temporary files that only an orderly exit removes.
            tempfile.tempdir = str(worker.scratch)
            compiled = worker.scratch / "compiled" if worker.regroups else None
            replica = _build_replica(worker, task, placed, spec, compiled=compiled)
            # Not before the replica: making data may compute, and then it is too late to settle threads.
            data = open_data(task.data, "data", trains=task.trains)
            fit_loop.prepare(worker, replica, data)
        else:
            data = open_data(task.data, "data", trains=task.trains)
            shapes = None if data.label_shapes is None else list(data.label_shapes)
            names: dict[str, Any] = {"feature_names": data.features, "label_names": data.labels}
            replica = _build_replica(worker, task, placed, spec, **names, label_shapes=shapes)
            _weigh(replica, task)
            if (inputs := data.no_rows()) is not None:
                replica.expect(inputs)
            data.held_by(replica.hold)
        weights: dict[str, str] | None = None
        start = begin(replica, task, states, data, rank=worker.rank)
        if len(states) == 1:  # a new run: what its user has frozen since the last one counts
            replica.restore_requires_grad()
        del states  # as large as the model
        if task.trains:
            validation = None
            if task.validation is not None:
                validation = open_data(task.validation, "validation_data", trains=False)
                if not follows:
                    validation.held_by(replica.hold)
            with (
                _synced(worker, task, start) as sync,
                closing(Regrouper(worker, task, replica, sync, data)) as regrouper,
            ):
                start = regrouper.begin(start)
                # What the process that this one replaces had kept.
                if worker.replaceable and (kept := worker.opened()):
                    start = begin(replica, task, [b"", kept], data, rank=worker.rank)
                kind: type[Loop] = fit_loop.FitLoop if follows else step_loop.StepLoop
                loop = kind(worker, task, replica, sync, data, validation, start, stopwatch)
                with loop.writing():
                    state = regrouper.run(loop)
                rows, moved = loop.rows, state is not None
                if state is None:
                    whole = sync.whole(replica)  # on all workers: they may have to meet for it
                    state = b""
                    if worker.leads:
                        with ThreadPoolExecutor(1) as beside:
                            digests = beside.submit(replica.digests) if whole is replica else None
                            state = whole.state()
                            if digests is not None and validation is not None:
                                most = -(-_PREDICTED_ROWS * worker.size // task.options.batch_size)
                                spent = sum(stopwatch.seconds.values())
                                limit_s = max(_PREDICTING_S, _PREDICTING_SHARE * spent)
                                predictions = _predictions(replica, validation, most, limit_s)
                            weights = None if digests is None else digests.result()
        else:
            evaluate = fit_loop.evaluate if follows else step_loop.evaluate
            rows, state, moved = [evaluate(worker, task, replica, data)], b"", False
        if not worker.leads:
            return [b"", b""]
        stopwatch.lap("other")
        report = {
            "rows": rows,
            "layout": data.layout,
            "statistics": _described(data, predictions),
            "mode": replica.mode,
            "step": replica.step,
            "spent": stopwatch.seconds,
            "moved": moved,
            "made": {
                **_rows_read(data),
                "threads": worker.threads,
                "device": placed.device,
                "weights": weights,
            },
        }
        return [json.dumps(report).encode(), state]


def _rows_read(data: Rows) -> dict[str, Any]:
    """How many rows were read, and a fingerprint of them and of their order; nothing if nobody counted."""
    if not data.counts:
        return {}
    marks = json.dumps([list(data.counts), list(data.marks)])
    return {"rows": sum(data.counts), "fingerprint": hashlib.sha256(marks.encode()).hexdigest()[:32]}


def run_server(worker: Group, task_bytes: bytes, spec: bytes, *states: bytes) -> Sequence[bytes]:
    """Serve the parameters of an asynchronous run on a rank of the role "ps", until the workers are done."""
    from kindler.sync.parameter_server import ParameterServer

    tempfile.tempdir = str(worker.scratch)
    task: Task = cloudpickle.loads(task_bytes)
    replica = FRAMEWORKS.load(task.framework).from_bytes(
        spec, device="cpu", seed=task.config.seed, threads=worker.threads
    )
    options = task.training.strategy.options
    server = ParameterServer(
        replica, lock=bool(options.get("lock", False)), max_staleness=options.get("max_staleness")
    )
    worker.answer_calls(server.serve, server.check)
    return []


def _described(data: Rows, predictions: Mapping[str, Summary]) -> dict[str, Any] | None:
    if not data.statistics:
        return None
    return Statistics(columns=merged(data.statistics), predictions=predictions).to_json()


def _predictions(replica: Any, validation: Rows, most: int, limit_s: float) -> dict[str, Summary]:
    """What the trained model predicts for so many of this worker's validation steps, if time allows."""
    steps = validation.own_steps() if validation.counts else ()
    chosen = sorted({steps[int(i)] for i in np.linspace(0, len(steps) - 1, most)}) if steps else []
    parts: list[Mapping[str, np.ndarray[Any, Any]]] = []
    rows, ends = 0, time.monotonic() + limit_s
    try:
        for batch in map(validation.batch, np.random.default_rng(0).permutation(chosen).tolist()):
            if rows and time.monotonic() > ends:
                break
            # Columns that a GPU keeps come as its tensors.
            features = tuple(np.asarray(f.cpu() if hasattr(f, "cpu") else f) for f in batch.features)
            outputs = [np.asarray(one) for one in replica.predict(features)]
            parts.append(measured(as_predictions(outputs)))  # outputs may be large
            rows += batch.rows
        measures = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if rows else {}
    except Exception:  # noqa: BLE001 - a model that trains need not predict, and its training is done
        return {}
    return merged([summarised(measures, rows)]) if rows else {}


def _process_group(worker: Group, task: Task, placed: Placement) -> AbstractContextManager[None]:
    if not task.process_group:
        return nullcontext()
    from kindler.frameworks.torch.exchange import process_group

    return process_group(worker, shared_gpus=placed.shared, timeout_s=task.config.settings.sync_timeout_s)


def _build_replica(worker: Group, task: Task, placed: Placement, spec: bytes, **options: Any) -> Any:
    """Raises ConfigError if several workers would use one GPU without permission."""
    replica = FRAMEWORKS.load(task.framework).from_bytes(
        spec,
        device=placed.device,
        rank=worker.rank,
        local_rank=placed.index,
        seed=task.config.seed,
        threads=worker.threads,
        **options,
    )
    if placed.visible is not None and not replica.on_gpu:
        set_current_worker(replace(current_worker(), device="cpu"))
    elif placed.problem is not None:
        raise ConfigError(placed.problem)
    if hasattr(replica, "set_up"):  # a module of Lightning wants to know what for
        replica.set_up("fit" if task.trains else "validate")
    return replica


def _weigh(replica: Any, task: Task) -> None:
    if task.trains:
        classes, column = task.training.class_weight, task.training.columns.weight_col is not None
        if classes or column:
            replica.weigh_rows(classes, column=column)


@contextmanager
def _synced(worker: Group, task: Task, start: Start) -> Iterator[Sync]:
    """What joins the replicas of all workers; a single one needs only the default strategy."""
    config, most = task.training.strategy, task.training.max_steps
    alone = worker.size == 1 and not servers_of(config)
    name, options = ("allreduce", {}) if alone else (config.name, config.options)
    with closing(SYNCS.load(name)(task.config.settings, **options)) as sync:
        sync.ends_at = None if most is None else start.first_step + most
        yield sync


def begin(replica: Any, task: Task, states: Sequence[bytes], data: Rows, *, rank: int) -> Start:
    """Load what the run continues from into the replica, and return where that is.

    `states` is the model's state (empty for a new one), then the files of checkpoints, best first.
    """
    candidates = [parse(file, verify=False) for file in states[1:]]  # the driver has verified them
    chosen = next((c for c in candidates if usable(c.header, task, data)), None)
    if candidates and chosen is not candidates[0] and rank == 0:
        where = f"the end of epoch {chosen.header.epoch}" if chosen else "the beginning"
        warnings.warn(
            "the newest checkpoint is from the middle of an epoch, and the rows or their order have changed;"
            f" continuing from {where}, so that every row is used once per epoch.",
            CheckpointWarning,
            stacklevel=2,
        )
    if chosen is not None:
        replica.load_state(chosen.state)
        return Start(**vars(chosen.header), local_states=chosen.local_states)
    if states[0]:
        replica.load_state(states[0])
    if task.limit is not None and rank == 0:
        task.limit.check(replica.expected_bytes())
    if task.trains and task.training.initial_epoch is not None:
        replica.epoch = task.training.initial_epoch
    return Start(epoch=replica.epoch, step=replica.step, first_epoch=replica.epoch, first_step=replica.step)


def usable(header: Header, task: Task, data: Rows) -> bool:
    """Whether training can continue from there without missing or repeating a row.

    Between epochs it always can. Within one, every lane must have the same rows in the same order, whichever
    worker has the lane; rows that were not counted are never known to be the same.
    """
    options = task.training
    return header.ends_epoch or (
        len(data.counts) > 0
        and (header.counts, header.marks) == (tuple(data.counts), tuple(data.marks))
        and header.batch_size == options.batch_size
        and header.steps_per_epoch == options.steps_per_epoch
        and (header.seed, header.shuffle) == (task.config.seed, options.shuffle)
    )
