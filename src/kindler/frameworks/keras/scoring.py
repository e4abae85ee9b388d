"""A Keras model for scoring only: no optimizer or time of saving, so equal models have equal bytes."""

from __future__ import annotations

import importlib
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kindler.frameworks.keras.spec import Archive, KerasSpec, dumps, with_archive
from kindler.frameworks.keras.state import pack, unpack
from kindler.frameworks.state_format import ScoringModel

_WEIGHTS = "model.weights.h5"
_WHOLE = ("Functional", "Sequential")  # read from an archive, these have all their variables
_KERAS = ("keras.", "tf_keras.")
_OF_TRAINING = {"optimizer", "optimizers"}


def scoring_model(spec: KerasSpec, state: Callable[[], bytes], before: ScoringModel | None) -> ScoringModel:
    model = spec.model
    if model is None or isinstance(model, Archive):
        return ScoringModel.of(dumps(spec), own_state(state()), before)
    archived = with_archive(replace(spec, compile_args_creator=None))
    assert isinstance(archived.model, Archive)
    slim = replace(archived.model, data=_without_training(archived.model.data), optimizer=None)
    whole = model.built and type(model).__name__ in _WHOLE and type(model).__module__.startswith(_KERAS)
    return ScoringModel.of(dumps(replace(archived, model=slim)), b"" if whole else own_state(state()), before)


def own_state(state: bytes) -> bytes:
    if not state:
        return state
    fields, arrays = unpack(state)
    count = fields.get("own")
    if count is None:  # it was written by an earlier version
        return state
    told = {name: value for name, value in fields.items() if name not in ("dtypes", "shapes")}
    return pack({**told, "names": fields["names"][:count], "epoch": 0, "step": 0}, arrays[:count])


def _without_training(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(file, "w") as target:
        for name in sorted(source.namelist()):
            content = source.read(name)
            if name == _WEIGHTS:
                content = _without_groups(content, _OF_TRAINING)
            elif name == "config.json":
                content = _without_keys(content, ["compile_config"])
            elif name == "metadata.json":
                content = _without_keys(content, ["date_saved"])
            target.writestr(zipfile.ZipInfo(name), content)  # with no date of its own
    return file.getvalue()


def _without_keys(content: bytes, names: Sequence[str]) -> bytes:
    known: dict[str, Any] = json.loads(content)
    return json.dumps({name: value for name, value in known.items() if name not in names}).encode()


def _without_groups(content: bytes, names: set[str]) -> bytes:
    h5py: Any = importlib.import_module("h5py")
    file = io.BytesIO()
    with h5py.File(io.BytesIO(content), "r") as source, h5py.File(file, "w") as target:
        for name in sorted(set(source) - names):
            source.copy(name, target)
        for name, value in source.attrs.items():
            target.attrs[name] = value
    return file.getvalue()
