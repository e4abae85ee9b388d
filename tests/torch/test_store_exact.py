"""A PyTorch model comes out of a store as it went in: precision, shared and frozen weights, modes, layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from kindler import Store
from kindler.errors import ConfigError


class Tied(nn.Module):
    """Ties in its constructor, and keeps a buffer that is not part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3, bias=False)
        self.decoder = nn.Linear(3, 3, bias=False)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.relu(self.encoder(x))) * self.scale


@pytest.fixture
def om(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def again(om: Store, model: nn.Module) -> nn.Module:
    om.models.put(model, "net")
    found: nn.Module = om.models.get("net", classes=[Tied])
    return found


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_weights_keep_their_precision(om: Store, kind: torch.dtype) -> None:
    model = small().to(kind).eval()
    found = again(om, model)
    assert found[0].weight.dtype is kind
    assert found[1].num_batches_tracked.dtype is torch.int64
    x = torch.randn(5, 3, dtype=kind)
    assert torch.equal(found(x), model(x))


def test_precisions_may_be_mixed(om: Store) -> None:
    model = small()
    model[3].double()
    found = again(om, model)
    assert (found[0].weight.dtype, found[3].weight.dtype) == (torch.float32, torch.float64)


def test_weights_that_are_tied_stay_tied(om: Store) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    found = again(om, model)
    assert found[2].weight is found[0].weight
    assert found[2].bias is not found[0].bias
    assert len(list(found.parameters())) == 3


def test_weights_that_a_class_ties_stay_tied_and_are_stored_once(om: Store) -> None:
    model = Tied()
    version = om.models.put(model, "net")
    found = om.models.get("net", classes=[Tied])
    assert found.decoder.weight is found.encoder.weight
    assert version.size < 2 * model.encoder.weight.nbytes + 200
    x = torch.randn(2, 3)
    assert torch.equal(found(x), model(x))


def test_a_version_from_before_ties_were_noted_is_read(om: Store) -> None:
    version = om.models.put(small(), "net")
    old = {key: version.meta[key] for key in ("form", "layers", "training")}
    om.store.publish(version.address, kind="torch", meta=old, shared=version.files)
    assert om.models.get("net")[0].weight.requires_grad


def test_frozen_parameters_stay_frozen(om: Store) -> None:
    model = small()
    model[0].requires_grad_(False)
    assert [p.requires_grad for p in again(om, model).parameters()] == [False, False, *[True] * 4]


def test_each_part_keeps_its_mode(om: Store) -> None:
    model = small()
    model[1].eval()
    assert [part.training for part in again(om, model).modules()] == [True, True, False, True, True]


def test_a_layer_that_is_there_twice_is_one_layer(om: Store) -> None:
    relu, shared = nn.ReLU(), nn.Linear(3, 3)
    model = nn.Sequential(shared, relu, nn.Sequential(shared, relu), nn.Linear(3, 1))
    found = again(om, model)
    assert found[1] is found[2][1]
    assert found[0] is found[2][0]
    x = torch.randn(4, 3)
    assert torch.equal(found(x), model(x))


def test_a_recurrent_layer_works_after_it_was_read(om: Store) -> None:
    model = nn.LSTM(3, 4, num_layers=2, batch_first=True).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    assert torch.equal(again(om, model)(x)[0], model(x)[0])


def hooked() -> nn.Module:
    model = small()
    model[0].register_forward_hook(lambda *_: None)
    return model


def same_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def changed_later() -> nn.Module:
    model = small()
    model[0].note = 3
    return model


def other_buffer() -> nn.Module:
    return Tied().double()  # the buffer that is not stored would be single again


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (hooked, "have hooks"),
        (same_memory, "in the same memory"),
        (changed_later, "Sequential"),
        (other_buffer, r"is a different model: \['scale'\]"),
        (lambda: nn.utils.weight_norm(nn.Linear(3, 3)), "have hooks"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), "cannot be imported elsewhere"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_what_cannot_be_kept_is_refused(om: Store, make: Callable[[], nn.Module], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        om.models.put(make(), "net")
    assert om.models.list() == []
