"""Outputs of any form are taken apart to tensors with names."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from kindler.errors import ConfigError
from kindler.frameworks.torch.outputs import flat, names_of, own_loss, without_loss

ONE, TWO, THREE = (torch.full((2, 1), float(i)) for i in range(3))


class Pair(NamedTuple):
    mean: torch.Tensor
    spread: torch.Tensor


@dataclass
class Result:
    score: torch.Tensor
    states: Any = None


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (ONE, None),
        ((ONE, (TWO, [THREE])), None),
        ({"a": ONE, "b": {"c": TWO, "d": (THREE,)}}, ("a", "b_c", "b_d_0")),
        (Pair(ONE, TWO), ("mean", "spread")),
        (Result(ONE, (TWO, THREE)), ("score", "states_0", "states_1")),
        (OrderedDict(logits=ONE, hidden=None, past_key_values=object()), ("logits",)),
        ([{"a": ONE}, TWO], ("prediction_0_a", "prediction_1")),
    ],
)
def test_tensors_keep_their_order_and_are_called_by_the_way_to_them(outputs: Any, names: Any) -> None:
    assert names_of(outputs) == names
    assert [t[0, 0].item() for t in flat(outputs)] == sorted(t[0, 0].item() for t in flat(outputs))


def test_what_is_no_tensor_or_has_a_name_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="outputs are tensors; it returned str"):
        flat({"a": "text"})
    with pytest.raises(ConfigError, match="two of the model's outputs are called 'a_b'"):
        names_of({"a": {"b": ONE}, "a_b": TWO})


def test_a_loss_of_the_models_own_is_found_and_left_out() -> None:
    loss = torch.tensor(0.5)
    assert own_loss({"loss": loss, "logits": ONE}) is loss
    assert own_loss((loss, ONE)) is loss
    assert own_loss({"logits": ONE}) is None
    assert list(without_loss({"loss": loss, "logits": ONE})) == ["logits"]
    assert without_loss((loss, ONE)) == (ONE,)
    assert without_loss({"loss": ONE}) == {"loss": ONE}, "a loss for each row is an output"
