"""What a worker needs to know of a run: built on the driver and pickled once."""

from __future__ import annotations

from dataclasses import dataclass, field

from kindler.config import RunSettings
from kindler.data.row_order import Dealing
from kindler.data.sources import Source
from kindler.errors import ConfigError
from kindler.train.loader_source import StreamSource
from kindler.train.options import EvaluateOptions, FitOptions


@dataclass(frozen=True, slots=True)
class StateLimit:
    """What a trained state may have to come back to the driver.

    Attributes:
        most: Its bytes.
        why: What the limit is for, and what to do about it.
    """

    most: int
    why: str

    def check(self, size: int) -> None:
        """Complain about a state that would be lost once it is trained.

        Raises:
            ConfigError: It is larger.
        """
        if size > self.most:
            raise ConfigError(f"the trained state will have {size:,} bytes, and {self.most:,} {self.why}")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run: what the user asked for, and what the run adds to it.

    Attributes:
        framework: The framework's name in the registry.
        options: What was asked for. `FitOptions` make it a training run, `EvaluateOptions` an evaluation.
        data: The rows to train on, or to evaluate.
        validation: The rows to evaluate while training.
        dealing: How rows are dealt to workers. None deals them as for a run that starts with these workers.
        seed: Decides initial weights, order and dropout.
        device: "auto", "cpu", "cuda" or "cuda:N".
        process_group: Whether `torch.distributed` joins the workers.
        model_dir: The folder of checkpoints.
        run_id: The run's name in its checkpoints.
        log_steps: Whether every worker reports the loss of every step.
        watched: Whether the driver follows the progress within an epoch, even if it is not shown.
        settings: Time limits, threads.
        share_gpus: Whether several workers may compute on one GPU.
        limit: How large the trained state may be; None where it does not matter.
    """

    framework: str
    options: FitOptions | EvaluateOptions
    data: Source | StreamSource
    validation: Source | StreamSource | None = None
    dealing: Dealing | None = None
    seed: int = 0
    device: str = "auto"
    process_group: bool = False
    model_dir: str | None = None
    run_id: str = ""
    log_steps: bool = False
    watched: bool = False
    settings: RunSettings = field(default_factory=RunSettings)
    share_gpus: bool = False
    limit: StateLimit | None = None

    @property
    def trains(self) -> bool:
        """Whether this run trains; otherwise it evaluates."""
        return isinstance(self.options, FitOptions)

    @property
    def training(self) -> FitOptions:
        """The options of a run that trains."""
        if not isinstance(self.options, FitOptions):
            raise TypeError("an evaluation has no training options.")
        return self.options

    @property
    def show(self) -> bool:
        """Whether anybody watches the progress within an epoch."""
        return self.watched or self.options.verbose > 0
