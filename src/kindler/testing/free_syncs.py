"""The contract suite of a sync whose ranks do not meet at every step: what `kindler.sync.contract` promises.

A sync's whole test file:

    class TestMine(FreeSyncContract):
        sync = "mine"

Its ranks are workers of the local engine, with parameter servers beside them where its row says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from kindler.config import RunSettings
from kindler.engine import local
from kindler.engine.job import Job, RankSpec, equal_ranks
from kindler.engine.outcome import Outcome
from kindler.group import Group
from kindler.strategies import Strategy
from kindler.sync.parameter_server import ParameterServer
from kindler.sync.registry import SYNCS, servers_of, sync_spec
from kindler.testing.replicas import Rows, cut
from kindler.testing.syncs import ROWS, WEIGHTS, Plane, points

_STEPS, _EPOCHS = 6, 8
# Rows of each rank in a step: also none, on one rank and then on another, and on all but one.
_CUTS = [(4, 4, 4), (7, 5, 0), (0, 1, 11), (0, 0, 12), (12, 0, 0), (3, 6, 3)]
_SET = 7.0

_Plane = partial(Plane, rate=0.02, momentum=0.5)


def _batch(epoch: int, step: int, counts: Sequence[int], rank: int) -> Rows:
    return cut(*points([epoch, step]), counts, rank)


def _serve(worker: Group, facts: bytes) -> list[bytes]:
    """What a parameter server of these tests does."""
    options = json.loads(facts)["options"]
    server = ParameterServer(
        _Plane(), lock=bool(options.get("lock", False)), max_staleness=options.get("max_staleness")
    )
    worker.answer_calls(server.serve, server.check)
    return []


def _train(worker: Group, facts: bytes) -> list[bytes]:
    """What a worker of these tests does; returns what it saw as JSON."""
    plan = json.loads(facts)
    cuts, ends_at = plan["cuts"], plan["ends_at"]
    replica = _Plane(first=float(worker.rank))
    sync = SYNCS.load(plan["sync"])(RunSettings(sync_timeout_s=60.0), **plan["options"])
    sync.ends_at = ends_at
    sync.attach(replica, worker)
    if worker.replaceable:
        worker.opened()
    seen: dict[str, Any] = {"in_step": sync.in_step, "first": replica.read()[0].tolist(), "epochs": []}
    for epoch in range(1, plan["epochs"] + 1):
        replica.begin_epoch(epoch)
        sync.begin_epoch(replica)
        if plan["sets"] and epoch == plan["epochs"]:
            seen["set"] = replica.read()[0].tolist()
            worker.barrier()  # before anybody's first step
        for step in range(_STEPS):
            sync.step(replica, _batch(epoch, step, cuts[step % len(cuts)], worker.rank))
            if ends_at is not None and replica.step >= ends_at:
                break
            if plan["stops"] and epoch == plan["epochs"] and step + 1 == plan["stops"][worker.rank]:
                break
        sync.catch_up(replica)
        row = {"weights": replica.read()[0].tolist(), "step": replica.step, "figures": sync.figures()}
        seen["epochs"].append(row)
        if plan["sets"] and epoch == plan["epochs"] - 1:
            replica.write([np.full(3, _SET)])  # as a callback at the end of an epoch may
        sync.next_epoch(replica, {})
    again = _Plane()
    if worker.leads:
        whole = sync.whole(replica)
        again.load_state(whole.state())
        seen["kept"] = [again.read()[0].tolist(), whole.epoch, whole.step]
    worker.barrier()
    sync.close()
    sync.close()
    return [json.dumps(seen).encode()]


class FreeSyncContract:
    """Facts about every sync whose ranks step by themselves.

    Attributes:
        sync: Its name in the registry.
        options: Options of its own.
    """

    sync: str
    options: dict[str, Any] = {}  # noqa: RUF012 - replaced by subclasses, never changed

    def _run(
        self,
        workers: int,
        *,
        epochs: int = _EPOCHS,
        cuts: Sequence[Sequence[int]] = _CUTS,
        ends_at: int | None = None,
        sets: bool = False,
        stops: Sequence[int] = (),
    ) -> list[dict[str, Any]]:
        config = Strategy(self.sync, **self.options)
        row = sync_spec(config)
        server = RankSpec(target=f"{__name__}:_serve", role="ps", ports=1, service=True, beside=True)
        facts = {
            "sync": self.sync,
            "options": self.options,
            "epochs": epochs,
            "cuts": cuts,
            "ends_at": ends_at,
            "sets": sets,
            "stops": stops,
        }
        job = Job(
            ranks=(*equal_ranks(f"{__name__}:_train", workers), *((server,) * servers_of(config))),
            buffers=(json.dumps(facts).encode(),),
            preload=(__name__,),
            together=row.together,
            replaceable=row.replaceable,
        )
        outcomes: list[Outcome] = local.run(job, listener=lambda event: None)
        return [json.loads(outcome.buffers[0]) for outcome in outcomes[:workers]]

    def test_ranks_of_uneven_rows_learn_agree_and_say_the_same(self) -> None:
        found = self._run(3)

        assert [seen["in_step"] for seen in found] == [False] * 3
        assert [seen["first"] for seen in found] == [[0.0] * 3] * 3, "all begin from the first rank's state"
        for rows in zip(*(seen["epochs"] for seen in found), strict=True):
            assert rows[1:] == rows[:1] * 2, "all ranks have the same weights, steps and metrics"
        last = found[0]["epochs"][-1]["weights"]
        assert np.abs(np.subtract(last, WEIGHTS)).max() < 0.25 * np.abs(WEIGHTS).max()
        steps = [row["step"] for row in found[0]["epochs"]]
        assert steps == sorted(set(steps)), "steps are counted through all epochs"

    def test_what_is_kept_of_a_run_is_what_its_ranks_have(self) -> None:
        first, *others = self._run(2, epochs=2, cuts=[(8, 4), (12, 0)])

        last = first["epochs"][-1]
        assert first["kept"] == [last["weights"], 2, last["step"]]
        assert all("kept" not in seen for seen in others), "one rank leads"

    def test_weights_that_callbacks_set_are_those_that_the_next_epoch_begins_with(self) -> None:
        found = self._run(2, epochs=2, cuts=[(6, 6)], sets=True)

        assert [seen["set"] for seen in found] == [[_SET] * 3] * 2

    def test_one_rank_trains_as_one_process_does(self) -> None:
        [seen] = self._run(1, epochs=2, cuts=[(ROWS,)])

        alone = _Plane()
        for epoch in (1, 2):
            for step in range(_STEPS):
                alone.train_step(_batch(epoch, step, [ROWS], 0))
            row = seen["epochs"][epoch - 1]
            np.testing.assert_allclose(row["weights"], alone.read()[0], rtol=1e-12)
            assert row["step"] == alone.step

    @pytest.mark.parametrize("stops", [(1, 2), (2, 5), (6, 1)])
    def test_ranks_that_an_interrupt_finds_at_different_steps_end_alike(self, stops: Sequence[int]) -> None:
        first, second = self._run(2, epochs=2, cuts=[(8, 4)], stops=stops)

        assert first["epochs"][-1]["weights"] == second["epochs"][-1]["weights"]

    @pytest.mark.parametrize("most", [4])
    def test_a_run_makes_no_more_steps_than_it_may(self, most: int) -> None:
        found = self._run(2, epochs=1, cuts=[(6, 6)], ends_at=most)

        assert [seen["epochs"][0]["step"] for seen in found] == [most] * 2
