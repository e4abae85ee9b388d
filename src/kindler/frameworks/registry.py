"""The table of frameworks: each row declares what one can do; its code loads on first use.

Other distributions add rows through the entry points "kindler.frameworks".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kindler.registry import Registry, Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameworkSpec(Spec):
    """A framework and its abilities, so that no code has to ask for its name.

    Attributes:
        can: "train", "evaluate", "predict"; "export" if its models can become ONNX or OpenVINO files.
        loop: Who runs the steps: Kindler ("step") or the framework itself ("fit", like Keras).
        callbacks: Packages whose `Callback` classes its users' callbacks derive from.
        row_weights: Whether it supports row and class weights.
        weighted_batches: Whether the third part of a user-made batch is a weight per row.
        watches_losses: Whether it reports whether each step's loss is finite (`watch_losses`).
        strategies: The strategies that can train it; None for every one that accepts the model.
        live: Whether the user may change the model between runs, so that its own state counts.
        gpus: Whether its models compute on GPUs.
        precisions: Precisions a model can be switched to, whatever it was made in.
        compile_modes: Allowed values of `compile=` in its estimators.
        form: The file format its models already have ("openvino"); None if none.
    """

    can: frozenset[str] = frozenset({"train", "evaluate", "predict"})
    loop: Literal["step", "fit"] = "step"
    callbacks: tuple[str, ...] = ("kindler",)
    row_weights: bool = False
    weighted_batches: bool = False
    watches_losses: bool = False
    strategies: tuple[str, ...] | None = None
    live: bool = False
    gpus: bool = False
    precisions: tuple[str, ...] = ()
    compile_modes: tuple[str, ...] = ()
    form: str | None = None


_EVERYTHING = frozenset({"train", "evaluate", "predict", "export"})


def _of_torch(name: str, target: str, *, extra: str = "torch", **abilities: Any) -> FrameworkSpec:
    return FrameworkSpec(
        name=name,
        target=f"kindler.frameworks.torch.{target}",
        package="torch",
        extra=extra,
        preload="kindler.frameworks.torch.replica:preload",
        can=_EVERYTHING,
        gpus=True,
        watches_losses=True,
        **abilities,
    )


FRAMEWORKS = Registry(
    "framework",
    [
        _of_torch(
            "torch",
            "replica:TorchReplica",
            precisions=("fp32", "bf16", "fp16"),
            compile_modes=("default", "reduce-overhead", "graphs", "auto"),
            row_weights=True,
        ),
        _of_torch(
            "torch_step",
            "step_replica:StepReplica",
            strategies=("allreduce",),
            precisions=("fp32", "bf16"),
            row_weights=True,
        ),
        _of_torch(
            "lightning",
            "lightning_replica:LightningReplica",
            extra="lightning",
            strategies=("allreduce",),
            precisions=("fp32", "bf16"),
        ),
        FrameworkSpec(
            name="keras",
            target="kindler.frameworks.keras.replica:KerasReplica",
            package="keras",
            extra="keras",
            preload="kindler.frameworks.keras.replica:preload",
            can=_EVERYTHING,
            loop="fit",
            callbacks=("keras", "tf_keras"),
            row_weights=True,
            weighted_batches=True,
            watches_losses=True,
            live=True,
            gpus=True,
        ),
        FrameworkSpec(
            name="openvino",
            target="kindler.frameworks.openvino.replica:OpenvinoReplica",
            package="openvino",
            extra="openvino",
            preload="kindler.frameworks.openvino.replica:preload",
            can=frozenset({"predict"}),
            form="openvino",
        ),
    ],
    group="kindler.frameworks",
)
