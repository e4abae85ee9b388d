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
import hashlib
import inspect
import warnings
import weakref
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.frameworks.torch import adapters
from kindler.frameworks.torch.huggingface import SentenceEncoder
from kindler.models._configurations import names_something, read_json
from kindler.models._torch_recipe import build, describe, difference, restore_flags, state_recipe
from kindler.models.kind import LoadedModel, Meta, confined, reject_unknown, require_trust
from kindler.models.predictor import Predictor
from kindler.models.safety import allowed_names, objects_in
from kindler.models.signature import Arrays
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
from kindler.store import Version

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_INDEX, _ADAPTER = ".index.json", "adapter_config.json"

_LENGTH = 16  # of made-up texts
_making = RLock()  # layers without numbers are made by replacing functions of torch, which all threads have
_BASE, _ADAPTERS, _DENSE = "base", "adapters.safetensors", "dense.safetensors"
_STORED = "_kindler_version"  # an attribute of models: the version that they are
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
        return isinstance(obj, _transformers().PreTrainedModel | SentenceEncoder)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        if isinstance(obj, SentenceEncoder):
            return self._write_encoder(obj, folder, trusted=trusted)
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
        with adapters.without_bars():
            obj.save_pretrained(folder)
        if not list(folder.glob("*.safetensors")):
            raise ConfigError(f"save_pretrained of {cls.__qualname__} wrote no weights as safetensors.")
        facts = {"form": "pretrained", "class": f"{cls.__module__}:{cls.__qualname__}"}
        facts["weights"] = adapters.weights_hash(obj)
        return {**facts, "training": obj.training, "dtype": str(obj.dtype).removeprefix("torch.")}

    def read(self, folder: Path, meta: Meta, *, trusted: bool, classes: Classes = (), **options: Any) -> Any:
        if meta["form"] == "encoder":
            return self._read_encoder(folder, meta, trusted=trusted, classes=classes)
        cls = _class(str(meta["class"]), classes, trusted=trusted)
        config = _configuration(folder, trusted=trusted)
        dtype = getattr(torch, str(meta.get("dtype")), None)
        try:
            with _making, adapters.without_bars():
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

    def belongs(self, obj: Any, version: Version) -> None:
        """Adapters that are made over it name the version as their base."""
        facts = {"version": str(version), "bucket": version.bucket, "weights": version.meta.get("weights")}
        vars(obj)[_STORED] = facts

    def estimator(self, **options: Any) -> Estimator:
        return Estimator.from_torch(**{"inputs": "kwargs", **options})

    def _write_encoder(self, obj: SentenceEncoder, folder: Path, *, trusted: bool) -> dict[str, Any]:
        (folder / _BASE).mkdir()
        stored = self.write(obj.encoder, folder / _BASE, trusted=trusted)
        layers = describe(obj.dense)
        if layers is None:
            raise ConfigError(
                f"layers after the pooling that are not torch.nn's cannot be stored: {obj.dense}"
            )
        save_weights({k: v.contiguous() for k, v in obj.dense.state_dict().items()}, folder / _DENSE)
        facts = {"pooling": list(obj.pooling), "normalize": obj.normalize, "dense": layers}
        return {"form": "encoder", "class": stored["class"], "encoder": stored, **facts}

    def _read_encoder(self, folder: Path, meta: Meta, *, trusted: bool, classes: Classes) -> Any:
        encoder = self.read(folder / _BASE, meta["encoder"], trusted=trusted, classes=classes)
        dense = build(meta["dense"])
        dense.load_state_dict(load_weights(folder / _DENSE))
        layers = list(dense.children())
        pooling, normalize = [str(name) for name in meta["pooling"]], bool(meta["normalize"])
        return SentenceEncoder(encoder, pooling=pooling, dense=layers, normalize=normalize)

    def predictor(self, model: Any) -> Predictor:
        if isinstance(model, SentenceEncoder):
            return NamedTorchPredictor(model, "kwargs", ["input_ids", "attention_mask"], self.device or "cpu")
        mask = ["attention_mask"] if "attention_mask" in inspect.signature(model.forward).parameters else []
        return _TransformersPredictor(model, "kwargs", [model.main_input_name, *mask], self.device or "cpu")

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        """Arrays by name, such as a tokenizer makes; outputs by name."""
        reject_unknown(options, frozenset(), what="predict of kind 'huggingface'")
        (x,) = data
        if isinstance(x, Mapping):
            return NamedTorchPredictor(loaded.model, "kwargs", tuple(map(str, x)), self.device or "cpu")(x)
        return loaded.predictor(x)

    def put_again(self, meta: Meta) -> dict[str, Any]:
        return {}


class _TransformersPredictor(NamedTorchPredictor):
    def example(self, rows: int) -> Arrays | None:
        """Models of text take any length."""
        declared = super().example(rows)
        first, *others = self.signature.names
        model: Any = self._model
        words = model.get_input_embeddings() if declared is None and first == "input_ids" else None
        if words is None:
            return declared
        shape = (rows, min(_LENGTH, getattr(model.config, "max_position_embeddings", _LENGTH)))
        ids = np.random.default_rng(0).integers(0, words.weight.shape[0], shape)
        return {first: ids, **{name: np.ones(shape, np.int64) for name in others}}


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
    config = read_json(folder / _CONFIG)
    if not isinstance(config, dict):
        raise ConfigError(f"{_CONFIG} is not a configuration.")
    if trusted:
        return config
    other = read_json(folder / _GENERATION) if (folder / _GENERATION).is_file() else {}
    parts = [*objects_in(config), *objects_in(other)]
    named = sorted({key for part in parts for key, value in part.items() if names_something(key, value)})
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
        index = read_json(path)
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict):
            raise ConfigError(f"{path.name} is not an index of weights.")
        for name in {str(name) for name in files.values()}:
            confined(path.parent, name)
    for path in folder.rglob("*"):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"the version's file {path.name!r} points outside the version.")
    return config


def _transformers() -> Any:
    return imported("transformers", what="a model of Hugging Face", extra="huggingface")


class PeftKind(TorchKind):
    """`PeftModel` objects whose adapters are LoRA or one of its kin, over models of transformers or PyTorch.

    `init` and `classes` are those of the base model; see `TorchKind`. With `share_base`, models that only
    predict have the weights of equal bases in one place.
    """

    kind = "peft"
    put_options = frozenset({"init"})
    get_options = TorchKind.get_options | {"share_base"}
    packages = ("peft", "torch", "safetensors")

    def can(self, obj: Any) -> bool:
        return isinstance(obj, adapters.peft().PeftModel)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        types = {str(_plain(config.peft_type)) for config in obj.peft_config.values()}
        if other := sorted(types - {*adapters.TYPES}):
            raise ConfigError(
                f"adapters of the type {other[0]} cannot be stored, only {adapters.TYPES}.\n{_HINT}"
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
        base = adapters.base_of(obj)
        kind = _base_kind(base)
        (folder / _BASE).mkdir()
        meta = kind.write(base, folder / _BASE, trusted=trusted, **options)
        recipe["base"] = {"kind": kind.kind, "meta": meta, "weights": adapters.weights_hash(base)}
        stored = vars(base).get(_STORED, {})
        if stored.get("weights") == recipe["base"]["weights"]:
            recipe["base"] |= {name: stored[name] for name in ("version", "bucket")}
        elif place := getattr(base, "name_or_path", ""):
            recipe["base"]["read_from"] = str(place)
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
            if named or config.get("peft_type") not in adapters.TYPES:
                shown = named or config.get("peft_type")
                require_trust(
                    trusted,
                    what="a model of peft",
                    reason=f"its adapters are configured with {shown}, which may name code or files to load",
                )
        stored = meta["base"]
        kind = _BASE_KINDS[str(stored["kind"])]
        with _making:
            base = kind.read(folder / _BASE, stored["meta"], trusted=trusted, classes=classes)
            if options.get("share_base") and not meta["merged"]:
                base = _shared(base)
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
        kind = copy.copy(_base_kind(base))
        if kind.kind == "huggingface":
            kind.device = self.device
            return kind.predictor(model)
        return TorchPredictor(model, self.device or "cpu", inputs_of=base)

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        return _base_kind(loaded.model.get_base_model()).call(loaded, verb, *data, **options)

    def put_again(self, meta: Meta) -> dict[str, Any]:
        return _BASE_KINDS[str(meta["base"]["kind"])].put_again(meta["base"]["meta"])


_BASE_KINDS: Mapping[str, TorchKind] = {"huggingface": HuggingFaceKind(), "torch": TorchKind()}


_bases: WeakValueDictionary[str, torch.nn.Module] = WeakValueDictionary()


def _shared(base: torch.nn.Module) -> torch.nn.Module:
    """The same model, of the weights that another one in this process has already.

    What a stored version says of its base is not asked: it could name that of others.
    """
    counted = hashlib.sha256(str(getattr(base, "config", base)).encode())
    for name, buffer in base.named_buffers():
        counted.update(f"{name} {buffer.dtype} {buffer.tolist()}".encode())
    key = f"{type(base).__qualname__} {adapters.weights_hash(base)} {counted.hexdigest()}"
    kept = _bases.setdefault(key, base)
    made = adapters.sharing(kept)
    weakref.finalize(made, id, kept)  # `kept` is there as long as anything shares it
    return made


def _base_kind(base: Any) -> TorchKind:
    return next(kind for kind in _BASE_KINDS.values() if kind.can(base))


def _wrapped(base: torch.nn.Module, recipe: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> Any:
    """The base with its adapters; the numbers of the adapters are those of `state`."""
    # Their first numbers come from the file, and some take long to find.
    configs = {name: _config(config) for name, config in recipe["adapters"].items()}
    first, *others = configs
    with _making, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a model that had adapters before
        # Without numbers: all of them come from the file, and no more memory is taken than that has.
        model = adapters.peft().get_peft_model(
            base, configs[first], adapter_name=first, low_cpu_mem_usage=True
        )
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


def _described(config: Any) -> dict[str, Any]:
    """The entries of a configuration that are not its class's own, as JSON has them."""
    usual, recipe = type(config)().to_dict(), config.to_dict()
    differ = [name for name, value in recipe.items() if name == "peft_type" or value != usual.get(name)]
    return {name: _plain(recipe[name]) for name in differ}


def _config(recipe: Mapping[str, Any]) -> Any:
    fields = copy.deepcopy(dict(recipe))
    if recipe["peft_type"] == "LORA":
        fields["init_lora_weights"] = False
    kind = adapters.peft().PeftType(fields.pop("peft_type"))
    return adapters.peft(".mapping").PEFT_TYPE_TO_CONFIG_MAPPING[kind](**fields)


def _merged(part: torch.nn.Module) -> list[str]:
    found = getattr(part, "merged_adapters", None)
    return found if isinstance(found, list) else []


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value
