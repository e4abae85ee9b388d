"""Prompts and the process that answers them: who joins and leaves, and what it may not say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from kindler.sandbox.process import ProcessLost, Reply
from kindler.serve.answers import Answers, Asked, News
from kindler.serve.http_errors import Problem
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import ModelStats

SETTINGS = ServeSettings(answers=2, queue_answers=3, answer_s=30)


class FakeProcess:
    """Keeps each step until `reply`. The real ones are in tests/torch/test_text_endpoints.py."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, Any]] = []
        self.lost: ProcessLost | None = None
        self._done: Callable[[Reply], None] | None = None

    def call(self, fields: Mapping[str, Any], parts: Any, done: Callable[[Reply], None]) -> None:
        assert self._done is None
        self.steps.append(fields["step"])
        self._done = done

    def lose(self, why: ProcessLost) -> None:
        self.lost = why

    def reply(self, *told: Any, error: Exception | None = None, **fields: Any) -> None:
        done, self._done = self._done, None
        assert done is not None
        done(Reply({}, error, {"began": [], "failed": [], "told": list(told), **fields}))


class FakePool:
    is_down = False

    def __init__(self) -> None:
        self.process = FakeProcess()
        self.free = 1
        self.grown = 0

    def take(self) -> FakeProcess:
        self.free -= 1
        return self.process

    def give_back(self, process: FakeProcess) -> None:
        self.free += 1

    def grow(self) -> None:
        self.grown += 1

    def when_free(self) -> None:
        pass


def run(scenario: Callable[[Answers, FakePool], Coroutine[Any, Any, None]]) -> ModelStats:
    stats = ModelStats()

    async def main() -> None:
        pool: Any = FakePool()
        keep: Any = None
        await scenario(Answers(pool, SETTINGS, stats, keep=keep), pool)

    asyncio.run(asyncio.wait_for(main(), 30))
    return stats


def asked(most: int = 5, **more: Any) -> Asked:
    return Asked(prompt="a", sampling={"max_new_tokens": most}, stream=True, **more)


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def joined(step: Mapping[str, Any]) -> list[int]:
    return [one["number"] for one in step["join"]]


def test_prompts_wait_for_room_and_the_process_is_given_back_after_the_last() -> None:
    async def scenario(answers: Answers, pool: FakePool) -> None:
        process = pool.process
        one, two = answers.submit([asked(), asked()]), answers.submit([asked()])
        await turn()
        assert joined(process.steps[-1]) == [0, 1]
        process.reply([0, "x", 1, None, None], [1, "y", 1, "stop", None], began=[[0, 4], [1, 4]])
        assert joined(process.steps[-1]) == [2]
        assert await one.news() == [(0, News("x")), (1, News("y", reason="stop"))]
        process.reply([0, "z", 1, "length", None], [2, "", 1, "stop", None], began=[[2, 7]])
        assert await one.news() == [(0, News("z", reason="length"))]
        assert await two.news() == [(0, News(reason="stop"))]
        assert (one.prompt_tokens, one.tokens, two.prompt_tokens) == ([4, 4], 3, [7])
        assert pool.free == 1
        one.leave()
        two.leave()

    stats = run(scenario)
    assert dict(stats.answers) == {"stop": 2, "length": 1}
    assert (stats.prompt_tokens, stats.generated_tokens, stats.running_answers) == (15, 4, 0)


def test_who_leaves_is_told_in_the_next_step_and_makes_room_there() -> None:
    async def scenario(answers: Answers, pool: FakePool) -> None:
        process = pool.process
        gone, stays = answers.submit([asked()]), answers.submit([asked()])
        waits, forgotten = answers.submit([asked()]), answers.submit([asked()])
        await turn()
        gone.leave()
        forgotten.leave()  # while it waits
        process.reply([0, "late", 1, None, None], [1, "x", 1, None, None])
        assert (process.steps[-1]["leave"], joined(process.steps[-1])) == ([0], [2])
        process.reply([1, "", 1, "stop", None], [2, "", 1, "stop", None])
        assert await stays.news() == [(0, News("x", reason="stop"))]
        assert await waits.news() == [(0, News(reason="stop"))]
        assert len(process.steps) == 2
        assert pool.free == 1

    assert dict(run(scenario).answers) == {"cancelled": 2, "stop": 2}


def test_more_prompts_than_may_wait_are_refused_at_once() -> None:
    async def scenario(answers: Answers, pool: FakePool) -> None:
        requests = [answers.submit([asked()]) for _ in range(5)]
        with pytest.raises(Problem, match="too many prompts are queued for this model: 5") as caught:
            answers.submit([asked()])
        assert caught.value.status == 429
        for request in requests:
            request.leave()

    run(scenario)


@pytest.mark.parametrize(
    "told",
    [
        [0, "x", 6, None, None],  # more tokens than were asked for
        [0, "x" * 6000, 1, None, None],
        [0, 5, 1, None, None],
        [0, "x", -1, None, None],
        [0, "x", True, None, None],
        [0, "x", 1, "bored", None],
        ["0", "x", 1, None, None],
        [0, "x", 1],
        None,
        [0, "x", 1, None, None, None],
    ],
)
def test_a_reply_that_makes_no_sense_ends_the_process_and_the_answers(told: Any) -> None:
    async def scenario(answers: Answers, pool: FakePool) -> None:
        request, waits = answers.submit([asked(), asked()]), answers.submit([asked()])
        await turn()
        pool.process.reply(told)
        with pytest.raises(Problem, match="sent a malformed reply") as caught:
            await request.news()
        assert caught.value.status == 500
        assert pool.process.lost is not None
        assert pool.process.lost.malformed
        assert len(pool.process.steps) == 1
        assert pool.free == 0
        assert pool.grown  # what waits goes to another process
        waits.leave()

    assert run(scenario).answers["failed"] == 2


def test_probabilities_that_make_no_sense_are_no_answer() -> None:
    for wrong in (None, [], [["x"]], [["x", "y", []]], [["x", -1.0, [1]]]):

        async def scenario(answers: Answers, pool: FakePool, wrong: Any = wrong) -> None:
            request = answers.submit([asked(top=1)])
            await turn()
            pool.process.reply([0, "x", 1, None, wrong])
            with pytest.raises(Problem, match="malformed"):
                await request.news()

        run(scenario)


def test_a_process_that_dies_ends_what_it_had_and_no_more() -> None:
    async def scenario(answers: Answers, pool: FakePool) -> None:
        request, waits = answers.submit([asked(), asked()]), answers.submit([asked()])
        await turn()
        pool.process.reply(error=ProcessLost("was ended by SIGKILL"))
        with pytest.raises(Problem, match="its process was ended by SIGKILL"):
            await request.news()
        pool.process, pool.free = FakeProcess(), 1
        answers.pump()
        assert joined(pool.process.steps[-1]) == [2]
        pool.process.reply([2, "x", 1, "stop", None])
        assert await waits.news() == [(0, News("x", reason="stop"))]

    run(scenario)


def test_an_error_of_one_prompt_is_its_own() -> None:
    async def scenario(answers: Answers, pool: FakePool) -> None:
        wrong, right = answers.submit([asked()]), answers.submit([asked()])
        await turn()
        pool.process.reply([1, "x", 1, "stop", None], failed=[[0, "the text has no tokens."]])
        with pytest.raises(Problem, match="the text has no tokens") as caught:
            await wrong.news()
        assert caught.value.status == 400
        assert await right.news() == [(0, News("x", reason="stop"))]

    run(scenario)


def test_what_is_not_read_is_kept_as_one_text() -> None:
    async def scenario(answers: Answers, pool: FakePool) -> None:
        request = answers.submit([asked()])
        await turn()
        for _ in range(4):
            pool.process.reply([0, "ab", 1, None, None])
        pool.process.reply([0, "c", 1, "length", None])
        assert await request.news() == [(0, News("abababab" + "c", reason="length"))]
        assert await request.news() == []

    run(scenario)
