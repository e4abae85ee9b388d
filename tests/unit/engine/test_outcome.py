"""What the ends of all ranks mean for the run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kindler.engine import outcome as rules
from kindler.engine.outcome import Outcome, failure, pack, unpack
from kindler.engine.worker import describe
from kindler.errors import DataError, StalledError, SyncError, SyncTimeoutError, WorkerLostError

SAID = {"types": ["builtins:ValueError"], "message": "boom", "traceback": "t", "host": "h", "sync": False}
BROKEN = {**SAID, "types": ["kindler.errors:SyncError"], "message": "peer gone", "sync": True}
GONE = {"reason": "killed", "host": "h", "exit_code": -9, "log_tail": "last"}
STUCK = {"ranks": [1], "hosts": {"0": "h", "1": "k"}, "stacks": {"0": "s", "1": "t"}, "waited_s": 9}


def test_all_results_are_no_failure() -> None:
    assert failure([Outcome(0, "result"), Outcome(1, "result")]) is None


def test_the_users_error_comes_before_a_lost_worker_and_a_broken_exchange() -> None:
    error = failure([Outcome(0, "error", BROKEN), Outcome(2, "lost", GONE), Outcome(1, "error", SAID)])

    assert isinstance(error, ValueError)
    assert str(error).startswith("boom")


def test_a_lost_worker_comes_before_the_broken_exchange_it_caused() -> None:
    error = failure([Outcome(0, "error", BROKEN), Outcome(1, "lost", GONE)])

    assert isinstance(error, WorkerLostError)
    assert (error.rank, error.exit_code, error.log_tail) == (1, -9, "last")


def test_a_stall_comes_after_the_users_error_and_before_a_lost_worker() -> None:
    stalled, lost = Outcome(0, "stalled", STUCK), Outcome(2, "lost", GONE)
    error = failure([lost, stalled])

    assert isinstance(error, StalledError)
    assert (error.ranks, error.stacks) == ((1,), {0: "s", 1: "t"})
    assert "worker 1 on k; the others are waiting" in str(error)
    assert isinstance(failure([lost, stalled, Outcome(1, "error", SAID)]), ValueError)


@pytest.mark.parametrize(
    ("kind", "fields", "part"),
    [
        ("error", SAID, "message"),
        ("error", BROKEN, "message"),
        ("lost", GONE, "reason"),
        ("stalled", STUCK, "waited_s"),
    ],
    ids=["an error", "a broken exchange", "a lost worker", "a stall"],
)
def test_of_several_failures_of_one_kind_the_first_is_raised(
    kind: str, fields: dict[str, Any], part: str
) -> None:
    different: list[Any] = [7, 8, 9] if part == "waited_s" else ["seven", "eight", "nine"]
    error = failure([Outcome(i, kind, {**fields, part: value}) for i, value in enumerate(different)])

    assert str(different[0]) in str(error)


def test_an_error_is_of_its_own_class_and_kindlers_own_is_itself() -> None:
    error = failure([Outcome(0, "error", {**SAID, "types": ["builtins:KeyError", "builtins:LookupError"]})])
    own = failure(
        [Outcome(0, "error", {**SAID, "types": ["kindler.errors:DataError", "builtins:ValueError"]})]
    )

    assert isinstance(error, KeyError)
    assert (type(own), str(own)) == (DataError, "boom")


def test_an_outcome_that_is_small_is_one_piece() -> None:
    assert len(list(pack(Outcome(0, "result", {}, (bytes(1000),))))) == 1


def test_a_broken_exchange_speaks_when_there_is_nothing_else() -> None:
    assert isinstance(failure([Outcome(0, "error", BROKEN), Outcome(1, "aborted")]), SyncError)


def _impatient(rank: int, missing: list[int]) -> Outcome:
    error = SyncTimeoutError(op="all_gather", missing=missing, size=4, waited_s=9)
    return Outcome(rank, "error", {**describe(error), "host": "h"})


def test_a_wait_in_vain_reaches_the_user_as_itself_with_the_ranks_that_did_not_wait() -> None:
    error = failure([_impatient(0, [1, 2, 3]), _impatient(1, [0, 2, 3]), Outcome(2, "aborted")])

    assert isinstance(error, SyncTimeoutError)
    assert error.missing == (2, 3)
    assert str(error).startswith("all_gather waited 9 s for 2 of 4 workers: [2, 3] did not arrive.")


def test_of_waits_at_several_exchanges_the_first_is_told() -> None:
    waits = []
    for rank, op in enumerate(("mean", "barrier")):
        error = SyncTimeoutError(op=op, missing=[1 - rank], size=2, waited_s=9)
        waits.append(Outcome(rank, "error", {**describe(error), "host": "h"}))
    told = failure(waits)

    assert isinstance(told, SyncTimeoutError)
    assert (told.op, told.missing) == ("mean", (1,)), "each waited, so nobody is missing but by its own word"


def test_a_wait_in_vain_for_a_lost_worker_is_that_loss() -> None:
    error = failure([_impatient(0, [1]), Outcome(1, "lost", GONE)])

    assert isinstance(error, WorkerLostError)


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_an_outcome_survives_being_cut_into_pieces(buffers: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "CHUNK_BYTES", 7)
        pieces = list(pack(Outcome(3, "result", {"a": 1}, tuple(buffers))))

    assert unpack(3, pieces) == Outcome(3, "result", {"a": 1}, tuple(buffers))
