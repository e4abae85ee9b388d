"""The queue in front of a model: what goes together, what is refused, and who is to blame."""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from kindler.models.signature import Arrays
from kindler.serve.batching import Batcher, Ticket
from kindler.serve.http_errors import Problem
from kindler.serve.model_pool import Call, LocalPool
from kindler.serve.settings import ServeSettings


class Model:
    """Doubles its input; remembers the calls; waits at a gate if it is told to."""

    def __init__(self) -> None:
        self.calls: list[list[float]] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, inputs: Arrays, method: str) -> Arrays:
        self.calls.append(inputs["x"].ravel().tolist())
        self.entered.release()
        assert self.gate.wait(30)
        if (inputs["x"] < 0).any():
            raise ValueError("negative")
        return {"y": inputs["x"] * 2}


_POOLS: list[LocalPool] = []


@pytest.fixture(autouse=True)
def _pools_are_closed() -> Iterator[None]:
    yield
    while _POOLS:
        _POOLS.pop().close()


def batcher_of(call: Call, *, batchable: bool | None = True, **limits: Any) -> Batcher:
    settings = ServeSettings(**limits)
    _POOLS.append(LocalPool(call, settings))
    return Batcher(_POOLS[-1], settings, {"predict": batchable})


def run(scenario: Callable[[Batcher, Model], Coroutine[Any, Any, None]], **limits: Any) -> Model:
    """Play a scenario on an event loop of its own."""
    model = Model()

    async def play() -> None:
        await scenario(batcher_of(model, **limits), model)

    asyncio.run(play())
    return model


def ask(batcher: Batcher, *values: float, batch: bool = True, timeout_s: float = 30) -> Ticket:
    array = np.array(values, dtype=np.float64)
    return batcher.submit({"x": array}, "predict", rows=len(array), timeout_s=timeout_s, batch=batch)


async def busy(batcher: Batcher, model: Model) -> Ticket:
    """The model is in a call, and stays there until its gate opens."""
    model.gate.clear()
    first = ask(batcher, 0)
    await asyncio.to_thread(model.entered.acquire)
    return first


def test_requests_that_arrive_together_share_a_call_and_get_their_own_rows() -> None:
    async def scenario(batcher: Batcher, model: Model) -> None:
        tickets = [ask(batcher, 1), ask(batcher, 2, 3), ask(batcher, 4)]
        results = [(await t.future)["y"].tolist() for t in tickets]
        assert results == [[2], [4, 6], [8]]
        assert batcher.rows_waiting == batcher.bytes_waiting == 0

    assert run(scenario).calls == [[1, 2, 3, 4]]


def test_what_comes_while_the_model_is_busy_goes_in_the_order_of_arrival() -> None:
    async def scenario(batcher: Batcher, model: Model) -> None:
        first = await busy(batcher, model)
        tickets = [ask(batcher, *values) for values in ([1, 2], [3, 4], [5], [6, 7, 8])]
        model.gate.set()
        await asyncio.gather(first.future, *(t.future for t in tickets))

    # The third would fit beside the first; it does not overtake the second.
    assert run(scenario, batch_rows=3).calls == [[0], [1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_request_larger_than_a_batch_is_cut_and_put_together() -> None:
    async def scenario(batcher: Batcher, model: Model) -> None:
        result = await ask(batcher, *range(10)).future
        assert result["y"].tolist() == [2 * i for i in range(10)]

    assert [len(call) for call in run(scenario, batch_rows=4).calls] == [4, 4, 2]


def test_inputs_of_another_shape_or_dtype_never_meet() -> None:
    async def scenario(batcher: Batcher, model: Model) -> None:
        others = [np.zeros((1, 2)), np.zeros((1, 3)), np.zeros((1, 2), np.float32)]
        tickets = [batcher.submit({"x": a}, "predict", rows=1, timeout_s=30) for a in others]
        results = [(await t.future)["y"] for t in tickets]
        assert [(r.shape, r.dtype) for r in results] == [(a.shape, a.dtype) for a in others]

    assert len(run(scenario).calls) == 3


def test_objects_of_other_types_never_meet() -> None:
    def types(inputs: Arrays, method: str) -> Arrays:
        return {"y": np.array([[len({type(i) for i in inputs["x"].ravel().tolist()})]] * len(inputs["x"]))}

    async def play() -> None:
        values = [[b"a"], ["a"], [None], [datetime.date(2026, 1, 1)], ["b"], [b"b"]]
        batcher = batcher_of(types)
        arrays = [np.array([value], dtype=object) for value in values]
        tickets = [batcher.submit({"x": a}, "predict", rows=1, timeout_s=30) for a in arrays]
        assert [(await ticket.future)["y"].tolist() for ticket in tickets] == [[[1]]] * len(values)

    asyncio.run(play())


def test_a_poison_row_fails_alone() -> None:
    async def scenario(batcher: Batcher, model: Model) -> None:
        tickets = [ask(batcher, value) for value in (1, 2, -3, 4, 5)]
        results = await asyncio.gather(*(t.future for t in tickets), return_exceptions=True)
        assert [r["y"].tolist() for r in results if isinstance(r, dict)] == [[2], [4], [8], [10]]
        assert isinstance(results[2], Problem)
        assert results[2].status == 400
        assert "ValueError: negative" in results[2].message

    run(scenario)


def test_outputs_without_a_row_for_each_row_end_the_sharing_and_are_right() -> None:
    def mean(inputs: Arrays, method: str) -> Arrays:
        return {"y": inputs["x"].mean(keepdims=True)}

    async def play() -> None:
        batcher = batcher_of(mean, batch_rows=4)
        tickets = [ask(batcher, 1, 3), ask(batcher, 5, 7), ask(batcher, *range(9))]
        assert [(await t.future)["y"].tolist() for t in tickets] == [[2], [6], [4]]
        assert not batcher.is_batchable("predict")
        assert batcher.rows_waiting == 0
        later = [ask(batcher, 1), ask(batcher, 2)]
        assert [(await t.future)["y"].tolist() for t in later] == [[1], [2]]

    asyncio.run(play())


def test_too_much_is_refused_at_once_with_a_time_to_come_back() -> None:
    async def scenario(batcher: Batcher, model: Model) -> None:
        first = await busy(batcher, model)
        waiting = ask(batcher, 1, 2, 3)
        with pytest.raises(Problem) as caught:
            ask(batcher, 4, 5)
        assert caught.value.status == 429
        assert int(caught.value.headers["retry-after"]) >= 1
        with pytest.raises(Problem) as caught:
            ask(batcher, *range(9))
        assert caught.value.status == 413
        model.gate.set()
        await asyncio.gather(first.future, waiting.future)
        assert batcher.rows_waiting == 0

    run(scenario, queue_rows=4, rows=8)


def test_who_goes_away_leaves_the_queue_and_is_never_computed() -> None:
    async def scenario(batcher: Batcher, model: Model) -> None:
        first = await busy(batcher, model)
        gone, stays = ask(batcher, 1), ask(batcher, 2)
        gone.leave()
        assert batcher.rows_waiting == 1
        model.gate.set()
        await asyncio.gather(first.future, stays.future)

    assert run(scenario).calls == [[0], [2]]


def test_a_request_may_ask_to_be_alone() -> None:
    async def scenario(batcher: Batcher, model: Model) -> None:
        tickets = [ask(batcher, 1), ask(batcher, 2, batch=False), ask(batcher, 3), ask(batcher, 4)]
        await asyncio.gather(*(t.future for t in tickets))

    assert run(scenario).calls == [[1], [2], [3, 4]]


ACROSS_ROWS: dict[str, Callable[[Any], Any]] = {
    "softmax over the batch": lambda x: np.exp(x) / np.exp(x).sum(axis=0),
    "normalised by the batch": lambda x: x - x.mean(axis=0),
    "sorted": lambda x: np.sort(x, axis=0),
    "the last row for all": lambda x: np.repeat(x[-1:], len(x), axis=0),
    "two classes": lambda x: np.array([0.25, 0.75]),
    "one number": lambda x: x.sum(),
    "as long as the batch, of the batch": lambda x: np.full(len(x), x.sum()),
}


@pytest.mark.parametrize("model", ACROSS_ROWS.values(), ids=ACROSS_ROWS)
@pytest.mark.parametrize("batches", [1, 3])
def test_what_a_request_gets_never_depends_on_who_asked_beside_it(
    model: Callable[[Any], Any], batches: int
) -> None:
    requests = [np.random.default_rng(i).normal(size=1 + i % 3) for i in range(40)]
    calls: list[int] = []

    def call(inputs: Arrays, method: str) -> Arrays:
        calls.append(len(inputs["x"]))
        return {"y": np.asarray(model(inputs["x"]))}

    async def play() -> None:
        batcher = batcher_of(call, batchable=False, batch_rows=4, batches=batches)
        tickets = [ask(batcher, *values) for values in requests]
        for ticket, values in zip(tickets, requests, strict=True):
            np.testing.assert_array_equal((await ticket.future)["y"], model(values))
        assert batcher.rows_waiting == batcher.bytes_waiting == 0

    asyncio.run(play())
    assert sorted(calls) == sorted(map(len, requests))  # each whole, each once: nobody's rows are tried


def test_a_model_that_nothing_is_known_of_never_shares_a_call() -> None:
    model = Model()

    async def play() -> None:
        batcher = batcher_of(model, batchable=None)
        assert [(await t.future)["y"].tolist() for t in [ask(batcher, 5), ask(batcher, 6, 7)]] == [
            [10],
            [12, 14],
        ]

    asyncio.run(play())
    assert model.calls == [[5], [6, 7]]
