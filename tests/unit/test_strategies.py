"""Values that say how workers agree."""

from __future__ import annotations

import inspect
import pickle

import pytest

from kindler import strategies
from kindler.strategies import FSDP, AllReduce, Async, LocalSGD, Strategy, Zero1
from kindler.sync.registry import SYNCS

VALUES: list[Strategy] = [
    AllReduce(),
    Async(lock=True, max_staleness=2, push_every=3, shards=2),
    LocalSGD(every_steps=5),
    FSDP(modules=["0"]),
    Zero1(divide="elements", one_copy=True),
]


def test_every_built_in_strategy_has_a_value() -> None:
    assert [value.name for value in VALUES] == [row.name for row in SYNCS.built_in]
    assert {type(value).__name__ for value in VALUES} | {"Strategy"} == set(strategies.__all__)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_has_all_options_of_its_strategy_with_the_same_defaults(value: Strategy) -> None:
    takes = inspect.signature(SYNCS.load(value.name)).parameters
    options = {name: takes[name].default for name in takes if name != "settings"}
    mine = {name: p.default for name, p in inspect.signature(type(value)).parameters.items()}

    assert mine == options
    assert value.options.keys() == options.keys()


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_travels_and_stays_equal(value: Strategy) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


def test_values_say_what_they_are_and_cannot_be_changed() -> None:
    assert repr(LocalSGD(every_steps=5)) == "LocalSGD(every_steps=5)"
    assert repr(Strategy("mine", level=3)) == "Strategy('mine', level=3)"
    assert Async(lock=True) != Async()
    with pytest.raises(AttributeError, match="cannot assign to field 'name'"):
        AllReduce().name = "async"  # type: ignore[misc]
