"""What a rank has of a divided optimizer is found after its process has gone, and moved back by itself."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kindler.errors import SyncError
from kindler.frameworks.torch.slice_record import SliceRecord, holds
from tests.unit.with_torch.test_sharded import OPTIMIZERS

pytestmark = pytest.mark.torch


class Moved:
    """Two slices, one of them a whole parameter laid out by columns, and the optimizer that moves them."""

    def __init__(self, name: str, **options: Any) -> None:
        whole = torch.nn.Parameter(torch.arange(12.0).reshape(4, 3).t())
        half = torch.nn.Parameter(torch.arange(10.0))
        flat = whole.detach().as_strided((12,), (1,))
        part = torch.nn.Parameter(half.detach()[2:7])
        self.slices: list[Any] = [
            SimpleNamespace(parameter=whole, start=0, stop=12, part=whole, flat=flat),
            SimpleNamespace(parameter=half, start=2, stop=7, part=part, flat=part.detach()),
        ]
        self.optimizer = getattr(torch.optim, name)([whole, part], lr=0.1, **options)
        self.state: Any = self.optimizer.state

    def step(self, record: SliceRecord, number: int) -> None:
        for each in self.slices:
            each.part.grad = torch.full_like(each.part, 0.1 * number)
        record.before(self.optimizer, self.slices)
        self.optimizer.step()
        record.after(self.slices, self.state, number)

    def values(self) -> list[Any]:
        states = [dict(self.state.get(each.part, {})) for each in self.slices]
        return [
            *(each.part.detach().clone() for each in self.slices),
            *({key: value.clone() for key, value in state.items()} for state in states),
            [group["lr"] for group in self.optimizer.param_groups],
        ]


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("test")
    yield made
    os.close(made)


@pytest.fixture
def other() -> Iterator[int]:
    made = os.memfd_create("test")
    yield made
    os.close(made)


def path(file: int) -> str:
    return f"/proc/self/fd/{file}"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_the_last_step_and_of_the_one_before_is_in_the_file(
    file: int, other: int, name: str
) -> None:
    moved, record, known = Moved(name, **OPTIMIZERS[name]), SliceRecord(file), {}
    record.begin(moved.slices, moved.state, 4)
    for number in range(5, 9):
        moved.step(record, number)
        known[number] = moved.values()[2:-1]

    assert [step for step in range(10) if holds(file, step)] == [7, 8]
    for step in (7, 8):
        found: Any = defaultdict(dict)
        SliceRecord(other, path(file)).begin(moved.slices, found, step)
        for each, expected in zip(moved.slices, known[step], strict=True):
            torch.testing.assert_close(dict(found.get(each.part, {})), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_undone_and_made_again_ends_as_if_made_once(file: int, name: str) -> None:
    alone, moved, record = Moved(name, **OPTIMIZERS[name]), Moved(name, **OPTIMIZERS[name]), SliceRecord(file)
    without = SliceRecord(-1)
    without.give_up()
    for number in range(1, 6):
        alone.step(without, number)
    record.begin(moved.slices, moved.state, 0)
    for number in range(1, 5):
        moved.step(record, number)
    before = moved.values()

    moved.step(record, 5)
    moved.optimizer.param_groups[0]["lr"] = 7.0  # as an optimizer may that adapts it
    assert record.go_back(moved.optimizer, moved.slices, moved.state, 4)

    torch.testing.assert_close(moved.values(), before, rtol=0, atol=0)
    moved.step(record, 5)
    torch.testing.assert_close(moved.values(), alone.values(), rtol=0, atol=0)


def test_a_process_that_dies_while_it_moves_its_slices_leaves_those_of_the_step_before(file: int) -> None:
    moved, record = Moved("Adam"), SliceRecord(file)
    record.begin(moved.slices, moved.state, 0)
    moved.step(record, 1)
    record.before(moved.optimizer, moved.slices)
    moved.state[moved.slices[0].part]["exp_avg"].fill_(9.0)

    assert [step for step in range(4) if holds(file, step)] == [1]


def test_nobody_continues_from_a_step_that_is_not_there_or_from_other_slices(file: int, other: int) -> None:
    moved, record = Moved("Adam"), SliceRecord(file)
    record.begin(moved.slices, moved.state, 0)
    moved.step(record, 1)

    assert not record.go_back(moved.optimizer, moved.slices, moved.state, 0)  # it had no state then
    for slices, step in ((moved.slices, 0), (moved.slices[:1], 1)):
        with pytest.raises(SyncError, match="other slices or of another step"):
            SliceRecord(other, path(file)).begin(slices, defaultdict(dict), step)
    with pytest.raises(SyncError, match="cannot be read"):
        SliceRecord(other, "/proc/self/fd/none").begin(moved.slices, defaultdict(dict), 1)


def test_a_state_that_is_not_all_tensors_is_not_kept(file: int) -> None:
    moved, record = Moved("Adam"), SliceRecord(file)
    record.begin(moved.slices, moved.state, 0)
    moved.step(record, 1)
    moved.state[moved.slices[0].part]["note"] = 3

    moved.step(record, 2)

    assert not any(holds(file, step) for step in range(3))
    assert not record.go_back(moved.optimizer, moved.slices, moved.state, 1)


def test_a_state_that_an_optimizer_replaces_in_each_step_is_kept(file: int, other: int) -> None:
    moved, record = Moved("SGD", momentum=0.9), SliceRecord(file)
    record.begin(moved.slices, moved.state, 0)
    moved.step(record, 1)
    part = moved.slices[0].part
    moved.state[part]["momentum_buffer"] = torch.full_like(part, 5.0)
    record.after(moved.slices, moved.state, 2)

    found: Any = defaultdict(dict)
    SliceRecord(other, path(file)).begin(moved.slices, found, 2)
    assert found[part]["momentum_buffer"].unique().tolist() == [5.0]
