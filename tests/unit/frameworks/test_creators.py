"""Calling what users hand in."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from kindler.errors import ConfigError
from kindler.frameworks.creators import call, positional, title


class Maker:
    """Callable in every way a user may think of."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def __call__(self, config: Any) -> Any:
        return ("called", config)

    def method(self, model: Any, config: Any) -> Any:
        return (model, config)

    @classmethod
    def of_class(cls, config: Any) -> Any:
        return (cls, config)


def _two(model: Any, config: Any) -> Any:
    return (model, config)


@pytest.mark.parametrize(
    ("creator", "expected"),
    [
        (lambda: "none", "none"),
        (lambda model: model, "m"),
        (_two, ("m", "c")),
        (lambda *args: args, ("m", "c")),
        (Maker().method, ("m", "c")),
        (Maker(), ("called", "m")),
        (Maker.of_class, (Maker, "m")),
        (functools.partial(_two, "bound"), ("bound", "m")),
        (functools.partial(_two, config="bound"), ("m", "bound")),
    ],
)
def test_each_callable_gets_as_much_as_it_takes(creator: Any, expected: Any) -> None:
    assert call(creator, "m", "c") == expected


def test_a_class_is_called_like_a_function() -> None:
    assert call(Maker, {"a": 1}).config == {"a": 1}


def test_a_builtin_without_a_signature_gets_everything() -> None:
    assert call(dict, {"a": 1}) == {"a": 1}


def test_a_default_of_another_type_is_not_a_place_for_the_argument() -> None:
    def model(hidden: int = 64) -> int:
        return hidden

    assert call(model, {"lr": 0.1}) == 64


def test_a_default_of_none_takes_the_argument_by_its_name() -> None:
    def model(config: Any = None) -> Any:
        return config

    def loss(size_average: Any = None) -> Any:
        return size_average

    assert call(model, {"lr": 0.1}) == {"lr": 0.1}
    assert call(loss, {"lr": 0.1}) is None


def test_a_default_of_the_same_type_is_replaced() -> None:
    def data(config: Any, batch_size: int = 32) -> int:
        return batch_size

    assert call(data, {}, 8) == 8


def test_too_many_required_parameters_are_named() -> None:
    def model(config: Any, width: int, *, depth: int) -> None: ...

    with pytest.raises(ConfigError, match=r"needs 'depth', 'width', but is called with 1 argument\."):
        call(model, {})


def test_an_error_of_the_creator_itself_is_left_alone() -> None:
    def model(config: Any) -> None:
        raise TypeError("my own")

    with pytest.raises(TypeError, match="my own"):
        call(model, {})


def test_required_positional_parameters_are_counted() -> None:
    assert [positional(f) for f in (_two, lambda: 0, lambda x, y=1: 0, Maker())] == [2, 0, 1, 1]


def test_a_callable_is_named_by_its_name_and_an_object_by_its_class() -> None:
    assert title(_two) == "_two()"
    assert title(Maker()) == "Maker()"
    assert title(functools.partial(_two)) == "partial()"
    assert title(3) == "int"


class Net:
    def __init__(self, hidden: int) -> None:
        self.hidden = hidden


class FromConfig:
    def __init__(self, options: dict[str, int]) -> None:
        self.hidden = options["hidden"]


def test_a_class_that_needs_something_else_is_not_called_with_the_config() -> None:
    with pytest.raises(
        ConfigError, match=r"the class Net needs 'hidden'.*\n.*lambda config: Net\(hidden=\.\.\.\)"
    ):
        call(Net, {"hidden": 3})
    assert call(FromConfig, {"hidden": 3}).hidden == 3
    assert call(lambda hidden: hidden, {"hidden": 3}) == {"hidden": 3}  # a function may call it as it likes
