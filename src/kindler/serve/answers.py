"""Prompts that one version of a text model answers: who waits, who runs, and what the answers are so far.

A process of the model adds a token to each running answer at a time. Every such step is a call like any
other, with its time limit and its checks; between two of them prompts join, and answers leave whose clients
have gone. What a client does not read stays here, and is never more than its answer. All happens on the event
loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kindler.errors import DataError
from kindler.sandbox.process import ProcessLost, Reply, SandboxProcess
from kindler.serve.batching import Batcher, as_call_problem, unresponsive
from kindler.serve.http_errors import Problem
from kindler.serve.model_pool import LocalSteps, Pool
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import ModelStats

_LETTERS = 1024  # of one token, at most
_REASONS = (None, "stop", "length")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One answer that a request asks for.

    Attributes:
        prompt: A text, or tokens; None if there are `messages`.
        sampling: The fields of `Sampling`.
        top: For how many of the likeliest tokens probabilities are wanted, too; None for none at all.
        stream: Whether its text is wanted as it comes.
    """

    prompt: str | list[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    sampling: Mapping[str, Any]
    top: int | None = None
    stream: bool = False


@dataclass(slots=True)
class News:
    """What is new of an answer: a text, its tokens with their probabilities, and why it ended, if it has."""

    text: str = ""
    tokens: list[Any] = field(default_factory=list)
    reason: str | None = None


@dataclass(slots=True, eq=False)
class _Row:
    number: int
    index: int
    owner: TextRequest
    asked: Asked
    news: News = field(default_factory=News)
    tokens: int = 0
    letters: int = 0
    last: float = 0.0  # when its last token came
    is_over: bool = False


class TextRequest:
    """A request for answers, from its arrival to `leave`.

    Attributes:
        prompt_tokens: Of each answer's prompt; 0 until it has begun.
        tokens: How many tokens its answers have.
    """

    def __init__(self, queue: Answers, asked: Sequence[Asked], first: int, limit_s: float) -> None:
        self._queue = queue
        self.arrived = time.perf_counter()
        self.rows = [_Row(first + i, i, self, one) for i, one in enumerate(asked)]
        self.prompt_tokens = [0] * len(asked)
        self._changed = asyncio.Event()
        self._problem: Problem | None = None
        late = Problem(504, f"the answer was not complete within {limit_s:g} s.")
        self._timer = asyncio.get_running_loop().call_later(limit_s, self.fail, late)

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)

    @property
    def is_over(self) -> bool:
        return all(row.is_over for row in self.rows)

    async def news(self) -> list[tuple[int, News]]:
        """Wait for something new; returns it by the number of the answer, and nothing once all have ended.

        Raises:
            Problem: The answers cannot be completed.
        """
        if not self._changed.is_set() and not self.is_over:
            await self._changed.wait()
        self._changed.clear()
        if self._problem is not None:
            raise self._problem
        new = [row for row in self.rows if row.news.text or row.news.tokens or row.news.reason]
        told = [(row.index, row.news) for row in new]
        for row in new:
            row.news = News()
        return told

    def leave(self) -> None:
        """Nobody wants more of it: its room is free at the next step."""
        self._timer.cancel()
        self._queue.remove([row for row in self.rows if not row.is_over], "cancelled")

    def fail(self, problem: Problem) -> None:
        if self._problem is None and not self.is_over:
            self._problem = problem
            self._queue.remove([row for row in self.rows if not row.is_over], "failed")
            self.wake()

    def wake(self) -> None:
        self._changed.set()


class Answers:
    """The prompts of one version of a model; `keep` is what lives as long as they are answered."""

    def __init__(self, pool: Pool, settings: ServeSettings, stats: ModelStats, *, keep: Batcher) -> None:
        self._pool = pool
        self._settings = settings
        self._stats = stats
        self._keep = keep
        self._numbers = 0
        self._waiting: deque[_Row] = deque()
        self._running: dict[int, _Row] = {}
        self._leaving: list[int] = []
        self._process: SandboxProcess | LocalSteps | None = None  # while there are answers in it
        self._in_step = False

    def submit(self, asked: Sequence[Asked]) -> TextRequest:
        """Queue the answers of a request.

        Raises:
            Problem: 429 or 503: too many wait already, or the model does not answer.
        """
        if self._pool.is_down:
            raise unresponsive()
        room = self._settings.queue_answers + self._settings.answers - len(self._running)
        if self._waiting and len(self._waiting) + len(asked) > room:
            text = f"too many prompts are queued for this model: {len(self._waiting)}."
            raise Problem(429, text, {"retry-after": "1"})
        request = TextRequest(self, asked, self._numbers, self._settings.answer_s)
        self._numbers += len(asked)
        self._waiting.extend(request.rows)
        self._count()
        # At the next turn of the loop: what arrived together begins together.
        asyncio.get_running_loop().call_soon(self.pump)
        return request

    def pump(self) -> None:
        """Begin a step, unless there is one under way or nothing to do."""
        if self._in_step:
            return
        if self._pool.is_down:
            for row in list(self._waiting):
                row.owner.fail(unresponsive())
        if not (self._waiting or self._running or self._leaving):
            self._release()
            return
        if self._process is None:
            if not self._pool.free:
                self._pool.grow()
                return
            self._process = self._pool.take()
        joining = [
            self._waiting.popleft()
            for _ in range(min(len(self._waiting), self._settings.answers - len(self._running)))
        ]
        self._running.update((row.number, row) for row in joining)
        leaving, self._leaving = self._leaving, []
        self._count()
        self._in_step = True
        join = [self._joining(row) for row in joining]
        self._process.call({"step": {"join": join, "leave": leaving}}, {}, self._stepped)

    def remove(self, rows: Sequence[_Row], reason: str) -> None:
        """End answers that are not complete."""
        for row in rows:
            self._end(row, reason)
            if self._running.pop(row.number, None) is not None:
                self._leaving.append(row.number)
        if any(row.is_over for row in self._waiting):
            self._waiting = deque(row for row in self._waiting if not row.is_over)
        self._count()
        if self._process is not None:
            asyncio.get_running_loop().call_soon(self.pump)

    def _joining(self, row: _Row) -> dict[str, Any]:
        asked = row.asked
        return {
            "number": row.number,
            "prompt": asked.prompt,
            "messages": asked.messages,
            "sampling": asked.sampling,
            "top": asked.top,
            "stream": asked.stream,
            "most_prompt": self._settings.prompt_tokens,
        }

    def _release(self) -> None:
        if self._process is not None:
            self._pool.give_back(self._process)  # type: ignore[arg-type]
            self._process = None
            self._pool.when_free()

    def _stepped(self, reply: Reply) -> None:
        self._in_step = False
        if reply.error is not None:
            if isinstance(reply.error, ProcessLost):
                self._process, self._leaving = None, []
            problem = as_call_problem(reply.error)
            for row in list(self._running.values()):
                self._running.pop(row.number, None)  # the process has none of them any more
                row.owner.fail(problem)
        else:
            try:
                self._read(reply.fields)
            except (ValueError, TypeError, KeyError) as exc:
                assert self._process is not None
                self._process.lose(ProcessLost(f"sent a malformed reply ({exc})", malformed=True))
                self._process, self._leaving = None, []
                problem = Problem(
                    500, "the model failed on these inputs: its process sent a malformed reply."
                )
                for row in list(self._running.values()):
                    self._running.pop(row.number, None)
                    row.owner.fail(problem)
        self.pump()

    def _read(self, fields: Mapping[str, Any]) -> None:
        """What a process says of its answers; ValueError, TypeError or KeyError if that makes no sense."""
        now = time.perf_counter()
        for number, tokens in fields["began"]:
            if (row := self._running.get(_whole(number))) is not None:
                row.owner.prompt_tokens[row.index] = _whole(tokens)
                self._stats.prompt_tokens += tokens
        for number, message in fields["failed"]:
            if (row := self._running.pop(_whole(number), None)) is not None:
                row.owner.fail(as_call_problem(DataError(str(message)[:2000])))
        for number, text, tokens, reason, probabilities in fields["told"]:
            row = self._running.get(_whole(number))
            if row is None:  # it has left meanwhile
                continue
            self._add(row, text, _whole(tokens), reason, probabilities, now)
        self._count()

    def _add(self, row: _Row, text: Any, tokens: int, reason: Any, probabilities: Any, now: float) -> None:
        if type(text) is not str or reason not in _REASONS:
            raise ValueError("no text of an answer")
        most = int(row.asked.sampling["max_new_tokens"])
        row.letters += len(text)
        if row.tokens + tokens > most or row.letters > _LETTERS * most:
            raise ValueError("an answer that is too long")
        if row.asked.top is not None:
            row.news.tokens.extend(_probabilities(probabilities, tokens, row.asked.top))
        if tokens:
            since = now - (row.last or row.owner.arrived)
            (self._stats.token_seconds if row.tokens else self._stats.first_token_seconds).add(since)
            row.last = now
        row.tokens += tokens
        self._stats.generated_tokens += tokens
        row.news.text += text
        row.news.reason = reason
        if reason is not None:
            self._running.pop(row.number)
            self._end(row, reason)
        if text or reason is not None or row.news.tokens:
            row.owner.wake()

    def _end(self, row: _Row, reason: str) -> None:
        row.is_over = True
        self._stats.answers[reason] += 1

    def _count(self) -> None:
        self._stats.running_answers, self._stats.waiting_answers = len(self._running), len(self._waiting)


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError("no number")
    return number


def _probabilities(told: Any, tokens: int, top: int) -> list[Any]:
    """Of each token: its text, the logarithm of its probability, and the same of the likeliest ones."""
    if not isinstance(told, list) or len(told) != tokens:
        raise ValueError("no probabilities")
    return [
        (str(text), float(chance), [(str(other), float(at)) for other, at in likeliest[:top]])
        for text, chance, likeliest in told
    ]
