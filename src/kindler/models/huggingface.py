"""Models of Hugging Face's packages: transformers, and peft's adapters over them or over PyTorch modules.

A model of transformers is what `save_pretrained` writes, read by `from_pretrained`. Weights are safetensors
and the configuration is JSON, so reading runs no code of the files. The class is one of the transformers
package; any other is given by the reader, or imported by its name if the store is trusted. Entries of the
configuration that name code elsewhere are left out.

A model of peft is its base model as its own kind stores it, and the adapters beside it, as safetensors and
JSON. A reader makes the base, wraps it with the adapters that the JSON says, and puts the numbers in. Entries
of an adapter's configuration that could load code or files need trust.
"""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.models._torch_recipe import difference, restore_flags, state_recipe
from kindler.models.kind import LoadedModel, Meta, confined, reject_unknown, require_trust
from kindler.models.predictor import Predictor
from kindler.models.safety import allowed_names, objects_in
from kindler.models.torch import (
    Classes,
    NamedTorchPredictor,
    TorchKind,
    TorchPredictor,
    class_of,
    load_weights,
    save_weights,
)
from kindler.registry import imported

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_INDEX, _ADAPTER = ".index.json", "adapter_config.json"
# What would be downloaded, or imported from packages that the file names.
_CODE = (
    *("auto_map", "custom_pipelines", "custom_generate", "attn_implementation", "experts_implementation"),
    *("quantization_config", "trust_remote_code", "use_pretrained_backbone", "use_timm_backbone"),
    "use_kernels",
)
# Entries of such names are files, folders or names on a hub if they are text, and sizes if they are numbers.
_PLACES = ("path", "file", "url", "repo", "hub", "remote", "weights", "backbone", "pretrained", "kernel")
_OWN_NAME = "name_or_path"  # where it came from; nobody reads that
_PLAIN: tuple[Any, ...] = (None, False, "", "eager", "sdpa", [], {})

_BASE, _ADAPTERS = "base", "adapters.safetensors"
_ADAPTER_TYPES = ("LORA", "IA3", "LOHA", "LOKR")
# What wrapping a model changes, and its defaults.
_PUT_BACK = {"init_lora_weights": True, "base_model_name_or_path": None, "modules_to_save": None}
_HINT = (
    "Hint: kind='pickle' with trusted=True stores any model; merge_and_unload() returns one without adapters."
)


class HuggingFaceKind(TorchKind):
    """`PreTrainedModel` objects. `classes` are those that the model may be of, besides transformers' own."""

    kind = "huggingface"
    put_options = frozenset[str]()
    packages = ("transformers", "torch", "safetensors")

    def can(self, obj: Any) -> bool:
        return isinstance(obj, _transformers().PreTrainedModel)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        cls = type(obj)
        if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
            raise ConfigError(
                f"the class of this model, {cls.__qualname__}, cannot be imported elsewhere.\n"
                "Hint: define it in a module; or kind='pickle' with trusted=True stores any model."
            )
        if getattr(obj, "_hf_peft_config_loaded", False):
            raise ConfigError(
                "this model has adapters from add_adapter(), which would be stored without the model.\n"
                "Hint: peft.get_peft_model(model, config) creates a model that is stored with its adapters."
            )
        with _without_bars():
            obj.save_pretrained(folder)
        if not list(folder.glob("*.safetensors")):
            raise ConfigError(f"save_pretrained of {cls.__qualname__} wrote no weights as safetensors.")
        facts = {"form": "pretrained", "class": f"{cls.__module__}:{cls.__qualname__}"}
        return {**facts, "training": obj.training, "dtype": str(obj.dtype).removeprefix("torch.")}

    def read(self, folder: Path, meta: Meta, *, trusted: bool, classes: Classes = (), **options: Any) -> Any:
        cls = _class(str(meta["class"]), classes, trusted=trusted)
        config = _configuration(folder, trusted=trusted)
        dtype = getattr(torch, str(meta.get("dtype")), None)
        try:
            with _without_bars():
                model = cls.from_pretrained(
                    folder,
                    config=cls.config_class.from_dict(config),
                    dtype=dtype if isinstance(dtype, torch.dtype) else torch.float32,
                    local_files_only=True,
                    use_safetensors=True,
                )
        except Exception as exc:  # of transformers, or of the user's class: they say why
            raise ConfigError(f"the stored Hugging Face model cannot be rebuilt: {exc}") from exc
        return model.train(bool(meta.get("training")))

    def estimator(self, **options: Any) -> Estimator:
        return Estimator.from_torch(**{"inputs": "kwargs", **options})

    def predictor(self, model: Any) -> Predictor:
        mask = ["attention_mask"] if "attention_mask" in inspect.signature(model.forward).parameters else []
        return NamedTorchPredictor(model, "kwargs", [model.main_input_name, *mask])

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        """Arrays by name, such as a tokenizer makes; outputs by name."""
        reject_unknown(options, frozenset(), what="predict of kind 'huggingface'")
        (x,) = data
        if isinstance(x, Mapping):
            return NamedTorchPredictor(loaded.model, "kwargs", tuple(map(str, x)))(x)
        return loaded.predictor(x)

    def put_again(self, meta: Meta) -> dict[str, Any]:
        return {}


@contextmanager
def _without_bars() -> Iterator[None]:
    """The library shows progress of each file it reads and writes."""
    bars = imported("transformers.utils.logging", what="a model", extra="huggingface")
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _class(path: str, classes: Classes, *, trusted: bool) -> Any:
    library = _transformers()
    module, _, name = path.partition(":")
    own = getattr(library, name, None) if module.startswith("transformers.") and name.isidentifier() else None
    cls: Any = own if isinstance(own, type) else class_of(path, classes, trusted=trusted)
    if not issubclass(cls, library.PreTrainedModel):
        raise ConfigError(f"{path!r} is not a model class of transformers.")
    return cls


def _configuration(folder: Path, *, trusted: bool) -> dict[str, Any]:
    """What the model was configured with."""
    config = _json(folder / _CONFIG)
    if not isinstance(config, dict):
        raise ConfigError(f"{_CONFIG} is not a configuration.")
    if trusted:
        return config
    other = _json(folder / _GENERATION) if (folder / _GENERATION).is_file() else {}
    parts = [*objects_in(config), *objects_in(other)]
    named = sorted({key for part in parts for key, value in part.items() if _names_something(key, value)})
    if (folder / _ADAPTER).exists():
        named.append(_ADAPTER)
    if named:
        require_trust(
            trusted,
            what="a model of Hugging Face",
            reason=f"its configuration has {', '.join(named[:5])}, which may name code or files that would be"
            " loaded",
        )
    for path in folder.rglob(f"*{_INDEX}"):  # weights in several files are files of the version
        index = _json(path)
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict):
            raise ConfigError(f"{path.name} is not an index of weights.")
        for name in {str(name) for name in files.values()}:
            confined(path.parent, name)
    for path in folder.rglob("*"):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"the version's file {path.name!r} points outside the version.")
    return config


def _names_something(key: str, value: Any) -> bool:
    """Whether an entry names code, or something elsewhere."""
    name = key.lstrip("_").lower()
    if value in _PLAIN or name == _OWN_NAME:
        return False
    text = isinstance(value, str) or (isinstance(value, list) and any(isinstance(v, str) for v in value))
    return name.startswith(_CODE) or (text and any(word in name for word in _PLACES))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{path.name} cannot be read: {exc}") from exc


def _transformers() -> Any:
    return imported("transformers", what="a model of Hugging Face", extra="huggingface")


class PeftKind(TorchKind):
    """`PeftModel` objects whose adapters are LoRA or one of its kin, over models of transformers or PyTorch.

    `init` and `classes` are those of the base model; see `TorchKind`.
    """

    kind = "peft"
    put_options = frozenset({"init"})
    packages = ("peft", "torch", "safetensors")

    def can(self, obj: Any) -> bool:
        return isinstance(obj, _peft().PeftModel)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        types = {str(_plain(config.peft_type)) for config in obj.peft_config.values()}
        if other := sorted(types - {*_ADAPTER_TYPES}):
            raise ConfigError(
                f"adapters of the type {other[0]} cannot be stored, only {_ADAPTER_TYPES}.\n{_HINT}"
            )
        recipe = {
            "form": "peft",
            "adapters": {name: _described(config) for name, config in obj.peft_config.items()},
            "active": [*obj.active_adapters],
            "disabled": any(getattr(part, "disable_adapters", False) is True for part in obj.modules()),
            "merged": sorted({name for part in obj.modules() for name in _merged(part)}),
            **state_recipe(obj),
        }
        if recipe["merged"]:
            obj = copy.deepcopy(obj)  # the user's stays as it is
            obj.unmerge_adapter()
        base = _without_adapters(obj)
        kind = _base_kind(base)
        (folder / _BASE).mkdir()
        meta = kind.write(base, folder / _BASE, trusted=trusted, **options)
        recipe["base"] = {"kind": kind.kind, "meta": meta}
        own = {id(tensor) for tensor in base.state_dict(keep_vars=True).values()}
        state = obj.state_dict(keep_vars=True)
        state = {name: tensor for name, tensor in state.items() if id(tensor) not in own}
        _check_same(obj, base, recipe, state)
        save_weights(
            {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder / _ADAPTERS
        )
        return recipe

    def read(self, folder: Path, meta: Meta, *, trusted: bool, classes: Classes = (), **options: Any) -> Any:
        for config in meta["adapters"].values():
            named = sorted(set(config) - allowed_names("peft entries"))
            if named or config.get("peft_type") not in _ADAPTER_TYPES:
                shown = named or config.get("peft_type")
                require_trust(
                    trusted,
                    what="a model of peft",
                    reason=f"its adapters are configured with {shown}, which may name code or files to load",
                )
        stored = meta["base"]
        kind = _BASE_KINDS[str(stored["kind"])]
        base = kind.read(folder / _BASE, stored["meta"], trusted=trusted, classes=classes)
        state = load_weights(folder / _ADAPTERS)
        try:
            model = _wrapped(base, meta, state)
        except Exception as exc:  # of peft: it says why
            raise ConfigError(f"the stored peft model cannot be rebuilt: {exc}") from exc
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

    def put_again(self, meta: Meta) -> dict[str, Any]:
        return _BASE_KINDS[str(meta["base"]["kind"])].put_again(meta["base"]["meta"])


_BASE_KINDS: Mapping[str, TorchKind] = {"huggingface": HuggingFaceKind(), "torch": TorchKind()}


def _base_kind(base: Any) -> TorchKind:
    return next(kind for kind in _BASE_KINDS.values() if kind.can(base))


def _wrapped(base: torch.nn.Module, recipe: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> Any:
    """The base with its adapters; the numbers of the adapters are those of `state`."""
    # Their first numbers come from the file, and some take long to find.
    configs = {name: _config(config) for name, config in recipe["adapters"].items()}
    first, *others = configs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a model that had adapters before
        # Without numbers: all of them come from the file, and no more memory is taken than that has.
        model = _peft().get_peft_model(base, configs[first], adapter_name=first, low_cpu_mem_usage=True)
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
    restore_flags(model, recipe)
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
            f"the model, wrapped again with its adapters, is different: {exc}\n{_HINT}"
        ) from exc
    if differ:
        raise ConfigError(f"the model, wrapped again with its adapters, differs: {differ[:5]}.\n{_HINT}")


def _without_adapters(model: Any) -> torch.nn.Module:
    """The base model, of the same tensors; the model itself is not changed."""
    tensors = [*model.parameters(), *model.buffers()]
    # Not by unload(), which takes the modules that were trained beside the adapters for those of the base.
    base: torch.nn.Module = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).get_base_model()
    wrappers = (
        _peft(".tuners.tuners_utils").BaseTunerLayer,
        _peft(".utils.other").AuxiliaryTrainingWrapper,
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


def _described(config: Any) -> dict[str, Any]:
    """The entries of a configuration that are not its class's own, as JSON has them."""
    usual, recipe = type(config)().to_dict(), config.to_dict()
    differ = [name for name, value in recipe.items() if name == "peft_type" or value != usual.get(name)]
    return {name: _plain(recipe[name]) for name in differ}


def _config(recipe: Mapping[str, Any]) -> Any:
    fields = copy.deepcopy(dict(recipe))
    if recipe["peft_type"] == "LORA":
        fields["init_lora_weights"] = False
    kind = _peft().PeftType(fields.pop("peft_type"))
    return _peft(".mapping").PEFT_TYPE_TO_CONFIG_MAPPING[kind](**fields)


def _merged(part: torch.nn.Module) -> list[str]:
    found = getattr(part, "merged_adapters", None)
    return found if isinstance(found, list) else []


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


def _peft(module: str = "") -> Any:
    return imported(f"peft{module}", what="a model of peft", extra="peft")
