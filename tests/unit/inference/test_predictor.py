"""Which loaded model a Predictor may use again."""

from __future__ import annotations

import dataclasses

import pytest

from kindler.inference.predictor import Recipe

RECIPE = Recipe(
    framework="torch",
    spec=b"spec",
    state=b"state",
    feature_names=("user", "item"),
    device="cpu",
    seed=0,
    threads=None,
    sys_path=("/a", "/b"),
)


def test_equal_recipes_have_one_key() -> None:
    assert dataclasses.replace(RECIPE).key == RECIPE.key


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Recipe)])
def test_a_recipe_that_differs_in_any_field_has_another_key(name: str) -> None:
    value = getattr(RECIPE, name)
    others = {tuple: ("b", "a"), bytes: b"other", str: "other", int: 7, type(None): 3}

    assert dataclasses.replace(RECIPE, **{name: others[type(value)]}).key != RECIPE.key


def test_bytes_that_move_from_one_field_to_the_next_make_another_key() -> None:
    one = dataclasses.replace(RECIPE, spec=b"ab", state=b"c")

    assert dataclasses.replace(RECIPE, spec=b"a", state=b"bc").key != one.key
