"""What a replica's state has of a model with adapters, and how a base is known."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from kindler.errors import ConfigError
from kindler.frameworks.torch import state
from kindler.frameworks.torch.adapters import base_of, weights_hash
from kindler.frameworks.torch.replica import TorchReplica

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.torch


def base(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))


def adapted(seed: int = 0, **options: Any) -> Any:
    config = peft.LoraConfig(**{"target_modules": ["0"], "modules_to_save": ["3"], "r": 2, **options})
    return peft.get_peft_model(base(seed), config)


def replica(model: Any) -> TorchReplica:
    optimizer = partial(torch.optim.Adam, lr=0.1)
    return TorchReplica(TorchReplica.make_spec(model=model, optimizer=optimizer, loss=nn.CrossEntropyLoss()))


def test_a_state_holds_adapters_heads_and_counts_but_nothing_frozen() -> None:
    made = state.parse(replica(adapted()).state())
    assert {name.removeprefix("base_model.model.") for name in made["model"]} == {
        "0.lora_A.default.weight",
        "0.lora_B.default.weight",
        "3.modules_to_save.default.weight",
        "3.modules_to_save.default.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    assert made["base"] == weights_hash(base())


def test_biases_of_the_base_that_train_are_kept() -> None:
    model = adapted(bias="all", modules_to_save=None)
    kept = {name.removeprefix("base_model.model.") for name in state.parse(replica(model).state())["model"]}
    assert {"0.base_layer.bias", "1.bias", "3.bias"} < kept
    assert not kept & {"0.base_layer.weight", "1.weight", "3.weight"}


def test_a_state_goes_into_the_same_base_only_also_as_weights() -> None:
    first = replica(adapted())
    with torch.no_grad():
        for parameter in first.model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    second = replica(adapted())
    second.load_state(first.state())
    rows = torch.ones(2, 4)
    assert torch.equal(second.model.eval()(rows), first.model.eval()(rows))
    with pytest.raises(ConfigError, match="the base of this model has changed"):
        replica(adapted(seed=1)).load_state(first.state())
    other = replica(adapted(target_modules=["3"], modules_to_save=None))
    with pytest.raises(ConfigError, match="not the weights of this model's adapters"):
        other.load_weights(first.weights())


def test_a_base_that_somebody_else_trains_is_hashed_again() -> None:
    model = adapted()
    own = replica(model)
    before = own.digests()["base"]
    with torch.no_grad():
        base_of(model)[0].weight.add_(1.0)  # type: ignore[index,operator,union-attr]
    assert own.digests()["base"] != before


def test_whole_states_of_before_still_load() -> None:
    model = adapted()
    own = replica(adapted())
    own.load_weights(state.save_weights(model.state_dict()))
