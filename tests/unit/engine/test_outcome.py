"""What the ends of all ranks mean for the run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kindler.engine import outcome as rules
from kindler.engine.outcome import Outcome, failure, pack, unpack
from kindler.engine.worker import describe
from kindler.errors import SyncError, SyncTimeoutError, WorkerLostError

SAID = {"types": ["builtins:ValueError"], "message": "boom", "traceback": "t", "host": "h", "sync": False}
BROKEN = {**SAID, "types": ["kindler.errors:SyncError"], "message": "peer gone", "sync": True}
GONE = {"reason": "killed", "host": "h", "exit_code": -9, "log_tail": "last"}


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


def test_a_wait_in_vain_for_a_lost_worker_is_that_loss() -> None:
    error = failure([_impatient(0, [1]), Outcome(1, "lost", GONE)])

    assert isinstance(error, WorkerLostError)


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_an_outcome_survives_being_cut_into_pieces(buffers: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "CHUNK_BYTES", 7)
        pieces = list(pack(Outcome(3, "result", {"a": 1}, tuple(buffers))))

    assert unpack(3, pieces) == Outcome(3, "result", {"a": 1}, tuple(buffers))
