"""Adapters of peft over a frozen model: what trains, travels and is kept is theirs alone.

The frozen weights below, the base, are where each process has them from. They are known by one hash, and a
state of adapters goes into no other base.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from kindler.errors import ConfigError
from kindler.registry import imported
from kindler.types import Lora, TextTask

TYPES = ("LORA", "IA3", "LOHA", "LOKR")
_TASKS = {
    "text-generation": "CAUSAL_LM",
    "text2text-generation": "SEQ_2_SEQ_LM",
    "token-classification": "TOKEN_CLS",
}


def peft(module: str = "") -> Any:
    return imported(f"peft{module}", what="a model of peft", extra="peft")


def is_adapted(model: object) -> bool:
    return any(
        cls.__module__.startswith("peft.") and cls.__name__ == "PeftModel" for cls in type(model).__mro__
    )


def called(model: Any) -> Any:
    """The base with the layers of its adapters in it, which has the attributes that generation reads."""
    return model.get_base_model() if is_adapted(model) else model


def config_of(adapter: Any, task: TextTask) -> Any:
    """What peft makes of `Lora`, or a configuration of its own."""
    library, kind = peft(), _TASKS.get(task, "SEQ_CLS")
    if task == "embedding":
        raise ConfigError("adapter: a model for embedding is not trained, and needs none.")
    if isinstance(adapter, Lora):
        targets = adapter.target_modules
        return library.LoraConfig(
            task_type=kind,
            r=adapter.rank,
            lora_alpha=2 * adapter.rank if adapter.alpha is None else adapter.alpha,
            lora_dropout=adapter.dropout,
            target_modules=targets if targets is None or isinstance(targets, str) else list(targets),
            modules_to_save=list(adapter.modules_to_save) or None,
        )
    if not isinstance(adapter, library.PeftConfig):
        raise ConfigError(
            f"adapter must be Lora(...) or a configuration of peft; received {adapter!r}.\n"
            "Hint: from kindler.types import Lora; adapter=Lora(rank=8)."
        )
    made = copy.deepcopy(adapter)
    if str(getattr(made.peft_type, "value", made.peft_type)) not in TYPES:
        raise ConfigError(f"adapter: the type must be one of {', '.join(TYPES)}; received {made.peft_type}.")
    made.task_type = made.task_type or kind
    return made


def adapted(base: torch.nn.Module, config: Any, seed: int) -> Any:
    """New adapters in a model's layers."""
    if is_adapted(base) or getattr(base, "peft_config", None):
        raise ConfigError("adapter: this model has adapters already.\nHint: pass it without adapter=...")
    if config.task_type in ("CAUSAL_LM", "SEQ_2_SEQ_LM") and not hasattr(
        base, "prepare_inputs_for_generation"
    ):
        raise ConfigError(f"adapter: {type(base).__name__} does not generate text.")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about weights that are tied
        torch.manual_seed(seed)
        try:
            return peft().get_peft_model(_prepared(base), copy.deepcopy(config))
        except (ValueError, KeyError, AttributeError, TypeError) as exc:
            layers = {n.rpartition(".")[2] for n, m in base.named_modules() if isinstance(m, torch.nn.Linear)}
            raise ConfigError(
                f"adapter: peft cannot adapt this {type(base).__name__}: {exc}\n"
                f"Hint: name layers in target_modules; its linear ones are {', '.join(sorted(layers)[:12])}."
            ) from exc


def _prepared(base: torch.nn.Module) -> torch.nn.Module:
    if not getattr(base, "is_quantized", False):
        return base
    made: torch.nn.Module = peft().prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    return made


def sharing(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of its layers, whose weights lie in the same memory."""
    own = {
        id(p): torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        for p in model.parameters()
        if type(p) is torch.nn.Parameter
    }
    return copy.deepcopy(model, own)


@dataclass(frozen=True)
class Place:
    """A folder, or a name on the hub, where a model of transformers is read from."""

    kind: str
    name: str
    options: Mapping[str, Any]

    def read(self, *, seeded: bool = True) -> Any:
        """Layers that the files lack are drawn, alike everywhere if `seeded`."""
        import transformers

        with torch.random.fork_rng(devices=[], enabled=seeded), without_bars():
            if seeded:
                torch.manual_seed(0)
            return getattr(transformers, self.kind).from_pretrained(self.name, **self.options)


@contextmanager
def without_bars() -> Iterator[None]:
    """The library shows progress of each file it reads and writes."""
    bars = imported("transformers.utils.logging", what="a model", extra="huggingface")
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


@dataclass(frozen=True)
class OverBase:
    """A creator: each process reads the base from its place, and puts new adapters on it."""

    place: Place
    sha256: str
    adapter: Any
    seed: int

    def __call__(self, config: object = None) -> Any:
        base = self.place.read()
        if (found := weights_hash(base)) != self.sha256:
            raise ConfigError(changed(self.sha256, found, f"the model at {self.place.name!r}"))
        return adapted(base, self.adapter, self.seed)


def above(base: torch.nn.Module, place: Place | None, adapter: Any, seed: int) -> Any:
    """A model with new adapters; or, if the base can be read elsewhere too, what makes one."""
    if place is None:
        return adapted(sharing(base), adapter, seed)
    known = weights_hash(base)
    adapted(base, adapter, seed)  # which says what is wrong with it before any worker starts
    revision = getattr(getattr(base, "config", None), "_commit_hash", None)  # of a name on the hub
    pinned = place if revision is None else replace(place, options={**place.options, "revision": revision})
    return OverBase(pinned, known, adapter, seed)


def quantized(bits: int, *, device: str, from_place: bool) -> dict[str, Any]:
    """The options of `from_pretrained` that read a base in 4 or 8 bits; not for devices that cannot."""
    problem = hint = ""
    if not from_place:
        problem = "a model that was passed is as it is"
        hint = "pass its folder, or its name on the hub."
    elif device.startswith("cpu") or not torch.cuda.is_available():
        problem = "bitsandbytes computes on GPUs of CUDA, which this process does not have"
        hint = "leave base_bits out; or create the estimator on a machine like those of its workers."
    elif importlib.util.find_spec("bitsandbytes") is None:
        problem, hint = "bitsandbytes is not installed", "pip install bitsandbytes"
    if problem:
        raise ConfigError(f"Lora(base_bits={bits}): {problem}.\nHint: {hint}")
    import transformers

    how = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return {"quantization_config": transformers.BitsAndBytesConfig(**how), "device_map": "cuda"}


def changed(known: str, found: str, what: str) -> str:
    return (
        f"{what} has changed: adapters were made for weights with the hash {known[:12]}, and these have"
        f" {found[:12]}.\nHint: bring the earlier weights back, or train new adapters on these."
    )


def base_of(model: Any) -> torch.nn.Module:
    """The base model, of the same tensors; the model itself is not changed."""
    tensors = [*model.parameters(), *model.buffers()]
    # Not by unload(), which takes the modules that were trained beside the adapters for those of the base.
    base: torch.nn.Module = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).get_base_model()
    wrappers = (
        peft(".tuners.tuners_utils").BaseTunerLayer,
        peft(".utils.other").AuxiliaryTrainingWrapper,
    )
    while found := next(((name, m) for name, m in base.named_modules() if isinstance(m, wrappers)), None):
        name, wrapper = found
        layer: Any = getattr(wrapper, "token_adapter", wrapper)  # of single tokens, which are trained alone
        inner = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.original_module
        if not name:
            base = inner
            break
        holder, _, leaf = name.rpartition(".")
        setattr(base.get_submodule(holder), leaf, inner)
    for name in ("peft_config", "_hf_peft_config_loaded"):  # which would say that it still has adapters
        vars(base).pop(name, None)
    return base


def weights_hash(model: torch.nn.Module, *, without: Collection[str] = ()) -> str:
    """Of the names, dtypes, shapes and numbers of all parameters; what layers count meanwhile is left out."""
    digest = hashlib.sha256()
    for name, tensor in sorted((name, p) for name, p in model.named_parameters() if name not in without):
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]};".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Frozen:
    """The base of an adapted model: which names of its state belong to it, and its hash."""

    def __init__(self, model: Any, sha256: str | None = None) -> None:
        self._model, self._sha256 = model, sha256
        self._hashed: list[int] = []
        base = base_of(model)
        own = {id(tensor) for tensor in base.parameters() if not tensor.requires_grad}
        self._names = {n for n, p in model.named_parameters(remove_duplicate=False) if id(p) in own}
        self._trained = {name for name, p in base.named_parameters() if p.requires_grad}

    @classmethod
    def below(cls, model: Any, creator: object) -> Frozen | None:
        """None where a model has no adapters."""
        if not is_adapted(model):
            return None
        return cls(model, creator.sha256 if isinstance(creator, OverBase) else None)

    @property
    def sha256(self) -> str:
        if self._sha256 is not None and hasattr(self._model, "unshard"):  # FSDP has other tensors meanwhile
            return self._sha256
        versions = [p._version for name, p in self._model.named_parameters() if name in self._names]
        if self._sha256 is None or (self._hashed and self._hashed != versions):
            self._sha256 = weights_hash(base_of(self._model), without=self._trained)
        self._hashed = versions  # somebody else may train an object that is the base
        return self._sha256

    def without(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What of a model's state is not the base's."""
        trained = [
            name for name, p in self._model.named_parameters() if name in self._names and p.requires_grad
        ]
        if trained:
            raise ConfigError(
                f"{trained[0]!r} belongs to the base of the adapters, and was unfrozen during training:"
                " checkpoints hold the adapters alone.\nHint: name it in modules_to_save of the adapter."
            )
        return {name: value for name, value in state.items() if not self._has(name)}

    def check(self, sha256: str | None) -> None:
        """Raises if a state was made for another base."""
        if sha256 is not None and sha256 != self.sha256:
            raise ConfigError(changed(sha256, self.sha256, "the base of this model"))

    def load(self, state: Mapping[str, Any]) -> None:
        found = self._model.load_state_dict(state, strict=False)
        lacking = [name for name in found.missing_keys if not self._has(name)]
        if lacking or found.unexpected_keys:
            problem = "are missing" if lacking else "do not belong to them"
            raise ConfigError(
                "these are not the weights of this model's adapters:"
                f" {(lacking or found.unexpected_keys)[:3]} {problem}."
            )

    def _has(self, name: str) -> bool:
        while name and name not in self._names:  # quantized weights have further entries below their name
            name = name.rpartition(".")[0]
        return bool(name)


def merged(model: Any) -> torch.nn.Module:
    """A plain model that computes the same; the adapted one stays as it is."""
    plain: torch.nn.Module = copy.deepcopy(model).merge_and_unload()
    return plain
