"""What Orca's callbacks see of a run, and the callback of Kindler that calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from kindler.compat.zoo.orca import InvalidInputError
from kindler.compat.zoo.orca.learn.pytorch.callbacks import Callback, MainCallback
from kindler.files import folder_at, split
from kindler.frameworks.torch.loss import Judge, Judged
from kindler.train import callbacks as core

_FORWARD = ("on_iter_forward", "on_train_forward", "on_val_forward")
_FIXED = ("on_pred_forward", "on_iter_backward", "on_lr_adjust")


def epoch_stats(row: Mapping[str, Any], last_loss: float | None = None) -> dict[str, Any]:
    stats: dict[str, Any] = {
        "epoch": row["epoch"],
        "batch_count": row["steps"],
        "num_samples": row["num_samples"],
        "train_loss": row["loss"],
    }
    if last_loss is not None:
        stats["last_train_loss"] = last_loss
    return stats | {name.lower(): value for name, value in row.items() if name.startswith("val_")}


class Runner:
    def __init__(self, run: core.Run, config: Mapping[str, Any], epochs: int | None) -> None:
        self._run = run
        self.config = dict(config)
        self.epochs, self.num_epochs = run.epoch, None if epochs is None else run.epoch + epochs
        self.batch_idx = 0
        self.batch: tuple[Any, ...] = ()
        self.output: Any = None
        self.target: Any = None
        self.loss: Any = None
        self.epoch_stats: dict[str, Any] = {}
        self.metrics_stats: dict[str, Any] = {}
        self.stop = False
        self._pocket: dict[str, Any] = {}

    rank = property(attrgetter("_run.rank"))
    size = property(attrgetter("_run.size"))
    global_step = property(attrgetter("_run.step"), doc="Steps since the model was created.")
    model = property(attrgetter("_run.model"))
    models = property(lambda self: [self.model])
    optimizer = property(attrgetter("_run.optimizer"))
    optimizers = property(lambda self: [self.optimizer])
    scheduler = property(attrgetter("_run.replica.scheduler"), doc="Its schedule of learning rates, or None.")
    schedulers = property(lambda self: [] if self.scheduler is None else [self.scheduler])
    criterion = property(attrgetter("_run.replica.loss.function"))

    def put(self, name: str, value: Any) -> None:
        if name in self._pocket:
            raise InvalidInputError(f"runner.put: there is a value {name!r} already; use update.")
        self._pocket[name] = value

    def update(self, name: str, value: Any) -> None:
        self._pocket[name] = value

    def get(self, name: str) -> Any:
        return self._pocket[name]

    def remove(self, name: str) -> None:
        self._pocket.pop(name, None)

    def get_state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epochs,
            "models": [self.model.state_dict()],
            "optimizers": [self.optimizer.state_dict()],
        }

    def save_checkpoint(self, filepath: str, save_weights_only: bool = False) -> None:
        """Write a file that `load_checkpoint` of the estimator reads."""
        if save_weights_only:
            folder, name = split(filepath)
            folder_at(folder).write(name, [self._run.weights()])
        else:
            self._run.write_checkpoint(filepath)


class OrcaHooks(core.Callback):
    def __init__(self, callbacks: Sequence[Callback], config: Mapping[str, Any], epochs: int | None) -> None:
        self._callbacks, self._config, self._epochs = list(callbacks), dict(config), epochs
        self._runner: Runner | None = None

    def on_run_begin(self, run: core.Run) -> None:
        self._runner = Runner(run, self._config, self._epochs)
        self._watch(run.replica, self._runner)
        self._each("before_run", run)

    def on_epoch_begin(self, run: core.Run) -> None:
        self._known.epochs, self._known.batch_idx = run.epoch, 0
        self._each("before_train_epoch", run)

    def on_step_begin(self, run: core.Run) -> None:
        self._each("before_train_iter", run)

    def on_step_end(self, run: core.Run) -> None:
        self._each("after_train_iter", run)
        self._known.batch_idx += 1

    def on_validation_begin(self, run: core.Run) -> None:
        self._known.batch_idx = 0
        self._each("before_val_epoch", run)

    def on_validation_end(self, run: core.Run, logs: dict[str, Any]) -> None:
        self._known.metrics_stats = {name.lower(): value for name, value in logs.items()}
        self._each("after_val_epoch", run)

    def on_epoch_end(self, run: core.Run, logs: dict[str, Any]) -> None:
        self._known.epoch_stats = epoch_stats(logs)
        self._each("after_train_epoch", run)

    def on_run_end(self, run: core.Run) -> None:
        self._each("after_run", run)

    @property
    def _known(self) -> Runner:
        assert self._runner is not None, "on_run_begin comes first"
        return self._runner

    def _each(self, hook: str, run: core.Run) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(self._known)
        if self._known.stop and run.stopping is None:
            run.stop("runner.stop was set by a callback")

    def _watch(self, replica: Any, runner: Runner) -> None:
        """Let the runner see each batch, and a `MainCallback` compute it."""
        main = next((part for part in self._callbacks if isinstance(part, MainCallback)), None)
        own = main if main is not None and _overrides(main, _FORWARD) else None

        def around(judge: Judge) -> Judge:
            def judged(features: tuple[Any, ...], labels: tuple[Any, ...], rows: int, source: Any) -> Judged:
                runner.batch, runner.target = (*features, *labels), labels[0] if len(labels) == 1 else labels
                if own is None:
                    found = judge(features, labels, rows, source)
                    runner.loss = found.loss.detach() * found.scale / max(float(found.weight), 1e-30)
                    return found
                forward = own.on_train_forward if replica.model.training else own.on_val_forward
                forward(runner)
                if not isinstance(runner.loss, torch.Tensor):
                    raise InvalidInputError(
                        f"on_iter_forward must set runner.loss to a tensor; it is {runner.loss!r}."
                    )
                targets = runner.target if isinstance(runner.target, tuple) else (runner.target,)
                made = Judged(runner.loss, float(rows), float(rows), opaque=True)
                replica.counter.add(made, runner.output, targets, rows)
                return made

            def in_turn(*batch: Any) -> Judged:
                if replica.model.training:
                    return judged(*batch)
                for callback in self._callbacks:
                    callback.before_val_iter(runner)
                found = judged(*batch)
                for callback in self._callbacks:
                    callback.after_val_iter(runner)
                runner.batch_idx += 1
                return found

            return in_turn

        replica.judge_through(around)
        if own is None:
            replica.model.register_forward_hook(lambda _, __, output: setattr(runner, "output", output))


def refuse_fixed(callbacks: Sequence[Any]) -> None:
    """Raise `InvalidInputError` for what is not a callback of Orca, and for what cannot be overridden."""
    wrong = [item for item in callbacks if not isinstance(item, Callback)]
    if wrong:
        raise InvalidInputError(
            f"callbacks must be those of orca.learn.pytorch.callbacks; received {wrong[0]!r}."
        )
    mains = [item for item in callbacks if isinstance(item, MainCallback)]
    if len(mains) > 1:
        raise InvalidInputError("callbacks can have one MainCallback only.")
    for main in mains:
        fixed = _overrides(main, _FIXED)
        if fixed:
            raise InvalidInputError(
                f"MainCallback.{fixed[0]} cannot be overridden.\nHint: clip gradients with the estimator's"
                " set_l2_norm_gradient_clipping(...), schedule rates with scheduler_creator, and return from"
                " the model what predict is to return."
            )


def _overrides(main: MainCallback, names: Sequence[str]) -> list[str]:
    return [name for name in names if getattr(type(main), name) is not getattr(MainCallback, name)]
