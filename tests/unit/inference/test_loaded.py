"""Which models stay loaded in a process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kindler.inference.loaded import LoadedModels


def never() -> object:
    raise AssertionError("it is loaded already")


def test_threads_that_want_one_model_at_the_same_time_load_it_once() -> None:
    models: LoadedModels[object] = LoadedModels()
    together = threading.Barrier(4)
    loads: list[object] = []

    def load() -> object:
        loads.append(object())
        return loads[-1]

    def wanted(_: int) -> object:
        together.wait()
        return models.get("a", load)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(wanted, range(4)))

    assert len(loads) == 1
    assert all(model is loads[0] for model in found)


def test_one_that_cannot_be_loaded_is_tried_again_by_the_next() -> None:
    models: LoadedModels[str] = LoadedModels()

    def fails() -> str:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        models.get("a", fails)

    assert models.get("a", lambda: "a") == "a"


def test_the_few_that_were_used_last_stay() -> None:
    models: LoadedModels[object] = LoadedModels(most=2)
    for key in "aba":
        models.get(key, object)
    models.get("c", object)

    models.get("a", never)
    models.get("c", never)
    assert models.get("b", lambda: "again") == "again"
    assert len(models) == 2


def test_one_that_nobody_has_used_for_long_is_let_go() -> None:
    clock = [0.0]
    models: LoadedModels[object] = LoadedModels(idle_s=300, now=lambda: clock[0])
    models.get("a", object)
    clock[0] = 200.0
    models.get("b", object)
    clock[0] = 350.0

    models.get("b", never)

    assert len(models) == 1


def test_one_whose_weights_have_changed_since_is_let_go() -> None:
    models: LoadedModels[object] = LoadedModels()
    models.get("a", object, content="old")
    models.get("b", object, content="new")

    models.forget("old")

    models.get("b", never)
    assert len(models) == 1
