"""Models of the peft package: the base model as its own kind stores it, and the adapters beside it.

Both are safetensors and JSON. A reader makes the base, wraps it with the adapters that the JSON says, and
puts the numbers in. Entries of an adapter's configuration that could load code or files need trust.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.models.huggingface import HuggingFaceKind
from kindler.models.kind import imported, require_trust
from kindler.models.predictor import Predictor
from kindler.models.torch import TorchKind, load_weights, save_weights
from kindler.models.torch_predictor import TorchPredictor
from kindler.models.torch_state import difference, noted, put_back_flags

if TYPE_CHECKING:
    from kindler.models.loaded import LoadedModel

_BASE, _ADAPTERS = "base", "adapters.safetensors"
_KINDS: Mapping[str, type[TorchKind]] = {"huggingface": HuggingFaceKind, "torch": TorchKind}
_TYPES = ("LORA", "IA3", "LOHA", "LOKR")
# What says how adapters compute. Others name modules, tokenizers or other models that would be loaded.
_HARMLESS = frozenset(
    {
        "alpha",
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "decompose_both",
        "decompose_factor",
        "ensure_weight_tying",
        "exclude_modules",
        "fan_in_fan_out",
        "feedforward_modules",
        "inference_mode",
        "init_ia3_weights",
        "init_lora_weights",
        "init_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "lora_dropout",
        "module_dropout",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "r",
        "rank_dropout",
        "rank_dropout_scale",
        "rank_pattern",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
        "trainable_token_indices",
        "use_dora",
        "use_effective_conv2d",
        "use_rslora",
    }
)
# What wrapping a model changes, and its defaults.
_PUT_BACK = {"init_lora_weights": True, "base_model_name_or_path": None, "modules_to_save": None}
_HINT = (
    "Hint: kind='pickle' with trusted=True stores any model; merge_and_unload() makes one without adapters."
)


class PeftKind(TorchKind):
    """`PeftModel` objects whose adapters are LoRA or one of its kin, over models of transformers or PyTorch.

    `init` and `classes` are those of the base model; see `TorchKind`.
    """

    kind: ClassVar[str] = "peft"
    put_options: ClassVar[frozenset[str]] = frozenset({"init"})
    packages: ClassVar[tuple[str, ...]] = ("peft", "torch", "safetensors")

    def can(self, obj: Any) -> bool:
        return isinstance(obj, _peft().PeftModel)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        kinds = sorted({str(_plain(config.peft_type)) for config in obj.peft_config.values()} - {*_TYPES})
        if kinds:
            raise ConfigError(f"adapters of the type {kinds[0]} cannot be stored, only {_TYPES}.\n{_HINT}")
        recipe = {
            "form": "peft",
            "adapters": {name: _described(config) for name, config in obj.peft_config.items()},
            "active": [*obj.active_adapters],
            "disabled": any(getattr(part, "disable_adapters", False) is True for part in obj.modules()),
            "merged": sorted({name for part in obj.modules() for name in _merged(part)}),
            **noted(obj),
        }
        if recipe["merged"]:
            obj = copy.deepcopy(obj)  # the user's stays as it is
            obj.unmerge_adapter()
        base = _without_adapters(obj)
        kind = _base_kind(base)
        (folder / _BASE).mkdir()
        recipe["base"] = {
            "kind": kind.kind,
            "meta": kind.write(base, folder / _BASE, trusted=trusted, **options),
        }
        own = {id(tensor) for tensor in base.state_dict(keep_vars=True).values()}
        state = obj.state_dict(keep_vars=True)
        state = {name: tensor for name, tensor in state.items() if id(tensor) not in own}
        _check_same(obj, base, recipe, state)
        save_weights(
            {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder / _ADAPTERS
        )
        return recipe

    def read(
        self,
        folder: Path,
        meta: Mapping[str, Any],
        *,
        trusted: bool,
        classes: Sequence[type[torch.nn.Module]] = (),
        **options: Any,
    ) -> Any:
        for config in meta["adapters"].values():
            named = sorted(set(config) - _HARMLESS)
            if named or config.get("peft_type") not in _TYPES:
                shown = named or config.get("peft_type")
                require_trust(
                    trusted,
                    what="a model of peft",
                    reason=f"its adapters are configured with {shown}, which may name code or files to load",
                )
        recipe = meta["base"]
        kind = _KINDS[str(recipe["kind"])]()
        base = kind.read(folder / _BASE, recipe["meta"], trusted=trusted, classes=classes)
        state = load_weights(folder / _ADAPTERS)
        try:
            model = _wrapped(base, meta, state)
        except Exception as exc:  # of peft: it says why
            raise ConfigError(f"the stored model of peft cannot be made again: {exc}") from exc
        if meta["merged"]:
            model.merge_adapter(adapter_names=list(meta["merged"]))
        return model

    def estimator(self, **options: Any) -> Estimator:
        return _base_kind(options["model"].get_base_model()).estimator(**options)

    def predictor(self, model: Any) -> Predictor:
        base = model.get_base_model()
        kind = _base_kind(base)
        if kind.kind == "huggingface":
            return kind.predictor(model)
        return TorchPredictor(model, self.device or "cpu", inputs_of=base)

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        return _base_kind(loaded.model.get_base_model()).call(loaded, verb, *data, **options)

    def put_again(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        return _KINDS[str(meta["base"]["kind"])]().put_again(meta["base"]["meta"])


def _wrapped(base: torch.nn.Module, recipe: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> Any:
    """The base with its adapters; the numbers of the adapters are those of `state`."""
    peft = _peft()
    # Their first numbers come from the file, and some take long to find.
    configs = {name: _config(config) for name, config in recipe["adapters"].items()}
    first, *others = configs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a model that had adapters before
        # Without numbers: all of them come from the file, and no more memory is taken than that has.
        model = peft.get_peft_model(base, configs[first], adapter_name=first, low_cpu_mem_usage=True)
        for name in others:
            model.add_adapter(name, configs[name], low_cpu_mem_usage=True)
    for name, config in recipe["adapters"].items():
        for key, usual in _PUT_BACK.items():
            if hasattr(model.peft_config[name], key):
                setattr(model.peft_config[name], key, copy.deepcopy(config.get(key, usual)))
    found = model.load_state_dict(state, strict=False, assign=True)
    lacking = [name for name, tensor in model.state_dict().items() if tensor.is_meta and name not in state]
    if lacking or found.unexpected_keys:
        raise ConfigError(f"the weights {(lacking or found.unexpected_keys)[:5]} do not belong together.")
    model.base_model.set_adapter(recipe["active"])
    if recipe["disabled"]:
        model.base_model.disable_adapter_layers()
    put_back_flags(model, recipe)
    return model


def _check_same(
    model: Any, base: torch.nn.Module, recipe: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Wrap the base as a reader will, without numbers, and compare; changes `base`."""
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    try:
        again = _wrapped(base, recipe, empty)
        differ = difference(model, again) or ([] if type(again) is type(model) else [type(again).__name__])
    except Exception as exc:  # of peft: it says why
        raise ConfigError(
            f"the model, wrapped again with its adapters, is another one: {exc}\n{_HINT}"
        ) from exc
    if differ:
        raise ConfigError(f"the model, wrapped again with its adapters, differs: {differ[:5]}.\n{_HINT}")


def _without_adapters(model: Any) -> torch.nn.Module:
    """The base model, of the same tensors; the model itself is not changed."""
    tensors = [*model.parameters(), *model.buffers()]
    # Not by unload(), which takes the modules that were trained beside the adapters for those of the base.
    base: torch.nn.Module = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).get_base_model()
    layers = imported("peft.tuners.tuners_utils", what="a model", package="peft", extra="peft")
    others = imported("peft.utils.other", what="a model", package="peft", extra="peft")
    wrappers = (layers.BaseTunerLayer, others.AuxiliaryTrainingWrapper)
    while found := next(((name, m) for name, m in base.named_modules() if isinstance(m, wrappers)), None):
        name, wrapper = found
        held = getattr(wrapper, "token_adapter", wrapper)  # of single tokens, which are trained alone
        inner = held.get_base_layer() if hasattr(held, "get_base_layer") else held.original_module
        if not name:
            return _alone(inner)
        holder, _, leaf = name.rpartition(".")
        setattr(base.get_submodule(holder), leaf, inner)
    return _alone(base)


def _alone(base: torch.nn.Module) -> torch.nn.Module:
    """The base without what peft has left on it, which would say that it still has adapters."""
    for name in ("peft_config", "_hf_peft_config_loaded"):
        vars(base).pop(name, None)
    return base


def _described(config: Any) -> dict[str, Any]:
    """The entries of a configuration that are not its class's own, as JSON has them."""
    usual, recipe = type(config)().to_dict(), config.to_dict()
    differ = [name for name, value in recipe.items() if name == "peft_type" or value != usual.get(name)]
    return {name: _plain(recipe[name]) for name in differ}


def _config(recipe: Mapping[str, Any]) -> Any:
    classes: Any = imported("peft.mapping", what="a model", package="peft", extra="peft")
    fields = copy.deepcopy(dict(recipe))
    if recipe["peft_type"] == "LORA":
        fields["init_lora_weights"] = False
    return classes.PEFT_TYPE_TO_CONFIG_MAPPING[_peft().PeftType(fields.pop("peft_type"))](**fields)


def _merged(part: torch.nn.Module) -> list[str]:
    found = getattr(part, "merged_adapters", None)
    return found if isinstance(found, list) else []


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


def _base_kind(base: Any) -> TorchKind:
    return next(kind for kind in (HuggingFaceKind(), TorchKind()) if kind.can(base))


def _peft() -> Any:
    return imported("peft", what="a model of peft", package="peft", extra="peft")
