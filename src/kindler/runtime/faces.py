"""What the verbs mean for each kind of model. Runs in the worker; loads a framework only with a model of it.

Training is `training.py`'s.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kindler.errors import ConfigError
from kindler.runtime.messages import READS
from kindler.store import Version

__all__ = ["call", "family_of"]

Verb = Callable[..., Any]

_KERAS_BATCH = 32  # of `predict`, if it is told nothing else

_FAMILIES = {
    "keras": "keras",
    "tf_keras": "keras",
    "savedmodel": "keras",
    "torch": "torch",
    "sklearn": "sklearn",
    "pickle": "pickle",
    "function": "function",
}


def family_of(version: Version) -> str:
    """What a version computes with; models of one family may share a process."""
    kind = version.meta.get("model_kind", version.kind)
    return "function" if version.shelf == "scripts" else _FAMILIES.get(str(kind), str(kind))


def call(model: Any, version: Version, verb: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """What a verb gives.

    Args:
        model: The model, as the store read it.
        version: What it is.
        verb: One of `READS`.
        args: The data, and for `score` the labels.
        options: What the model's own method takes besides.

    Raises:
        ConfigError: Models of this kind cannot do that.
    """
    verbs = _VERBS.get(version.kind)
    if verbs is None:
        raise ConfigError(f"{version} is of kind {version.kind!r}, which the runtime does not run.")
    found = verbs.get(verb) or verbs.get("*")
    if found is None:
        raise ConfigError(
            f"{version} is of kind {version.kind!r} and has no {verb}; it has {', '.join(verbs)}."
        )
    if not args:
        raise ConfigError(f"{verb}() of {version} needs data, or the name of a dataset.")
    return found(model, verb, *args, **options)


def _own_method(model: Any, verb: str, *args: Any, **options: Any) -> Any:
    method = getattr(model, verb, None)
    if not callable(method):
        raise ConfigError(f"a {type(model).__qualname__} has no {verb}.")
    return method(*args, **options)


def _keras_predict(model: Any, verb: str, x: Any, **options: Any) -> Any:
    if not options and isinstance(x, np.ndarray) and x.dtype == np.float32 and 0 < len(x) <= _KERAS_BATCH:
        # The one batch that `predict` would make of it, without setting up a pipeline for it.
        return model.predict_on_batch(x)
    return model.predict(_arrays(x), **{"verbose": 0, **options})


def _keras_score(model: Any, verb: str, x: Any, y: Any = None, **options: Any) -> Any:
    return model.evaluate(_arrays(x), _arrays(y), **{"verbose": 0, "return_dict": True, **options})


def _torch_predict(model: Any, verb: str, x: Any) -> Any:
    torch = importlib.import_module("torch")
    given = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else [x]
    kinds = (weight.dtype for weight in model.parameters() if weight.is_floating_point())
    kind = next(kinds, torch.float32)
    tensors = [torch.from_numpy(np.array(_arrays(one))) for one in given]
    tensors = [tensor.to(kind) if tensor.is_floating_point() else tensor for tensor in tensors]
    try:
        model.eval()
    except NotImplementedError:
        pass  # an exported program is as it was exported
    with torch.inference_mode():
        return _plain(model(*tensors))


def _estimator_predict(model: Any, verb: str, x: Any, **options: Any) -> Any:
    bare = isinstance(x, np.ndarray)
    columns = model.signature["feature_cols"] or "x"
    name = columns if isinstance(columns, str) else columns[0]
    scored = model.predict({name: x} if bare else x, **{"verbose": 0, **options})
    if not bare:
        return scored
    outputs = {key: value for key, value in scored.items() if key != name}
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _estimator_score(model: Any, verb: str, x: Any, y: Any = None, **options: Any) -> Any:
    return model.evaluate(x if y is None else (x, y), **{"verbose": 0, **options})


def _saved_model_predict(model: Any, verb: str, x: Any) -> Any:
    tensorflow = importlib.import_module("tensorflow")
    serve = model.signatures.get("serving_default") if hasattr(model, "signatures") else None
    if serve is None:
        raise ConfigError("the SavedModel has no signature 'serving_default'.")
    wanted = serve.structured_input_signature[1]
    given = dict(x) if isinstance(x, Mapping) else dict(zip(wanted, [x], strict=True))
    tensors = {name: tensorflow.cast(_arrays(value), wanted[name].dtype) for name, value in given.items()}
    made = _plain(serve(**tensors))
    return next(iter(made.values())) if len(made) == 1 else made


def _function(model: Any, verb: str, x: Any, y: Any = None, **options: Any) -> Any:
    return _plain(model(x, verb, **({} if y is None else {"labels": y}), **options))


_SKLEARN: dict[str, Verb] = dict.fromkeys(READS, _own_method)
_KERAS: dict[str, Verb] = {"predict": _keras_predict, "score": _keras_score}
_VERBS: dict[str, dict[str, Verb]] = {
    "sklearn": _SKLEARN,
    "pickle": _SKLEARN,
    "keras": _KERAS,
    "tf_keras": _KERAS,
    "torch": {"predict": _torch_predict},
    "estimator": {"predict": _estimator_predict, "score": _estimator_score},
    "savedmodel": {"predict": _saved_model_predict},
    "function": {"*": _function},
}


def _arrays(data: Any) -> Any:
    """Tables as matrices; anything else as it is."""
    module = type(data).__module__.partition(".")[0]
    if module == "pyarrow":
        data = data.to_pandas()
        module = "pandas"
    return data.to_numpy() if module == "pandas" else data


def _plain(outputs: Any) -> Any:
    """Tensors as arrays, however they are nested."""
    if isinstance(outputs, Mapping):
        return {str(key): _plain(value) for key, value in outputs.items()}
    if isinstance(outputs, list | tuple):
        return type(outputs)(_plain(value) for value in outputs)
    if hasattr(outputs, "detach"):
        return outputs.detach().cpu().numpy()
    return outputs.numpy() if hasattr(outputs, "numpy") and not isinstance(outputs, np.ndarray) else outputs
