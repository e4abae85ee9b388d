"""Models of Hugging Face's transformers: what `save_pretrained` writes, read by `from_pretrained`.

Weights are safetensors and the configuration is JSON, so reading runs no code of the files. The class is one
of the transformers package; any other is given by the reader, or imported by its name if the store is
trusted. Entries of the configuration that name code elsewhere are left out.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.models.kind import confined, imported, known_only, require_trust
from kindler.models.predictor import Predictor
from kindler.models.torch import TorchKind, class_of
from kindler.models.torch_predictor import NamedTorchPredictor

if TYPE_CHECKING:
    from kindler.models.loaded import LoadedModel

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_INDEX = ".index.json"
_ADAPTER = "adapter_config.json"
# What would be downloaded, or imported from packages that the file names.
_CODE = (
    "auto_map",
    "custom_pipelines",
    "custom_generate",
    "attn_implementation",
    "experts_implementation",
    "quantization_config",
    "trust_remote_code",
    "use_pretrained_backbone",
    "use_timm_backbone",
    "use_kernels",
)
# Entries of such names are files, folders or names on a hub if they are text, and sizes if they are numbers.
_PLACES = ("path", "file", "url", "repo", "hub", "remote", "weights", "backbone", "pretrained", "kernel")
_OWN_NAME = "name_or_path"  # where it came from; nobody reads that
_PLAIN: tuple[Any, ...] = (None, False, "", "eager", "sdpa", [], {})


class HuggingFaceKind(TorchKind):
    """`PreTrainedModel` objects. `classes` are those that the model may be of, besides transformers' own."""

    kind: ClassVar[str] = "huggingface"
    put_options: ClassVar[frozenset[str]] = frozenset()
    packages: ClassVar[tuple[str, ...]] = ("transformers", "torch", "safetensors")

    def can(self, obj: Any) -> bool:
        return isinstance(obj, _transformers().PreTrainedModel)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        cls = type(obj)
        if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
            raise ConfigError(
                f"the class of this model, {cls.__qualname__}, cannot be imported by others.\n"
                "Hint: define it in a module; or kind='pickle' with trusted=True stores any model."
            )
        if getattr(obj, "_hf_peft_config_loaded", False):
            raise ConfigError(
                "this model has adapters that add_adapter() made; they would be stored without the model.\n"
                "Hint: peft.get_peft_model(model, config) makes a model that is stored with its adapters."
            )
        with _without_bars():
            obj.save_pretrained(folder)
        if not list(folder.glob("*.safetensors")):
            raise ConfigError(f"save_pretrained of {cls.__qualname__} wrote no weights as safetensors.")
        facts = {"form": "pretrained", "class": f"{cls.__module__}:{cls.__qualname__}"}
        return {**facts, "training": obj.training, "dtype": str(obj.dtype).removeprefix("torch.")}

    def read(
        self,
        folder: Path,
        meta: Mapping[str, Any],
        *,
        trusted: bool,
        classes: Sequence[type[torch.nn.Module]] = (),
        **options: Any,
    ) -> Any:
        cls: Any = _class(str(meta["class"]), classes, trusted=trusted)
        config = _configuration(folder, trusted=trusted)
        try:
            with _without_bars():
                model = cls.from_pretrained(
                    folder,
                    config=cls.config_class.from_dict(config),
                    dtype=_dtype(meta.get("dtype")),
                    local_files_only=True,
                    use_safetensors=True,
                )
        except Exception as exc:  # of transformers, or of the user's class: they say why
            raise ConfigError(f"the stored model of Hugging Face cannot be made again: {exc}") from exc
        return model.train(bool(meta.get("training")))

    def estimator(self, **options: Any) -> Estimator:
        return Estimator.from_torch(**{"inputs": "kwargs", **options})

    def predictor(self, model: Any) -> Predictor:
        mask = ["attention_mask"] if "attention_mask" in inspect.signature(model.forward).parameters else []
        return NamedTorchPredictor(model, "kwargs", [model.main_input_name, *mask])

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        """Arrays by name, such as a tokenizer makes; outputs by name."""
        known_only(options, frozenset(), what="predict of kind 'huggingface'")
        (x,) = data
        if isinstance(x, Mapping):
            return NamedTorchPredictor(loaded.model, "kwargs", tuple(map(str, x)))(x)
        return loaded.predictor(x)

    def put_again(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        return {}


@contextmanager
def _without_bars() -> Iterator[None]:
    """The library shows progress of each file it reads and writes."""
    said = imported("transformers.utils.logging", what="a model", package="transformers", extra="huggingface")
    shown = said.is_progress_bar_enabled()
    said.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            said.enable_progress_bar()


def _class(path: str, classes: Sequence[type[torch.nn.Module]], *, trusted: bool) -> Any:
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
    named = sorted({*_naming(config), *_naming(other)})
    if (folder / _ADAPTER).exists():
        named.append(_ADAPTER)
    if named:
        require_trust(
            trusted,
            what="a model of Hugging Face",
            reason=f"its configuration has {', '.join(named[:5])}, which may name code or files that would be"
            " loaded",
        )
    _check_indexes(folder)
    return config


def _naming(config: Any) -> Iterator[str]:
    """Entries, at any depth, that name code, or something elsewhere."""
    left = [config]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            yield from (str(key) for key, inside in value.items() if _names_something(str(key), inside))


def _names_something(key: str, value: Any) -> bool:
    name = key.lstrip("_").lower()
    if value in _PLAIN or name == _OWN_NAME:
        return False
    text = isinstance(value, str) or (isinstance(value, list) and any(isinstance(v, str) for v in value))
    return name.startswith(_CODE) or (text and any(word in name for word in _PLACES))


def _check_indexes(folder: Path) -> None:
    """Weights in several files are files of the version."""
    for path in folder.rglob(f"*{_INDEX}"):
        index = _json(path)
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict):
            raise ConfigError(f"{path.name} is not an index of weights.")
        for name in {str(name) for name in files.values()}:
            confined(path.parent, name)
    for path in folder.rglob("*"):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"the version's file {path.name!r} leads elsewhere.")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{path.name} cannot be read: {exc}") from exc


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, str(name), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _transformers() -> Any:
    what = "a model of Hugging Face"
    return imported("transformers", what=what, package="transformers", extra="huggingface")
