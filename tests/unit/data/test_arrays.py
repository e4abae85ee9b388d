"""Arrays that came without names take those that were asked for."""

from __future__ import annotations

import numpy as np

from kindler.data.arrays import named

X, Y = np.zeros((3, 2)), np.arange(3)


def test_arrays_without_names_take_those_asked_for_by_their_place() -> None:
    found = named(((X, X), Y)).called(["user", "item"], ["stars"])

    assert (found.features, found.labels) == (("user", "item"), ("stars",))
    assert list(found.columns) == ["user", "item", "stars"]


def test_names_that_are_there_stay() -> None:
    for data, asked in (
        ((X, Y), ["x"]),  # there already
        (((X, X), Y), ["one"]),  # not as many
        (({"user": X}, Y), ["item"]),  # the caller's own names
        ({"a": X, "b": Y}, ["c"]),
    ):
        assert named(data).called(asked, None) == named(data)
