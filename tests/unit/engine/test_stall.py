"""When a gang counts as stalled, who is to blame, and how stacks are shown."""

from __future__ import annotations

from pathlib import Path

import kindler
from kindler.engine.stall import Motion, beat_interval, readable

KINDLER = str(Path(kindler.__file__).parent)


def gang(size: int = 2) -> Motion:
    """All have their job at second 0; 10 seconds make a stall."""
    motion = Motion(size, 10.0, beat_s=1.0)
    for rank in range(size):
        motion.pulse(rank, 0, False, 0.0)
    return motion


def test_a_gang_that_does_not_move_for_too_long_is_stalled() -> None:
    motion = gang()

    assert not motion.stalled(10.0)
    assert motion.stalled(10.1)


def test_one_rank_that_moves_is_enough() -> None:
    motion = gang()
    motion.pulse(1, 1, False, 9.0)

    assert not motion.stalled(19.0)
    assert motion.stalled(19.1)


def test_a_pulse_without_a_new_tick_is_no_movement() -> None:
    motion = gang()
    motion.pulse(1, 0, True, 9.0)

    assert motion.stalled(10.1)


def test_exchanges_and_reports_are_movement() -> None:
    motion = gang()
    motion.moved(9.0)

    assert not motion.stalled(19.0)


def test_the_time_counts_from_when_all_have_their_job() -> None:
    motion = Motion(2, 10.0, beat_s=1.0)
    motion.pulse(0, 0, False, 0.0)
    assert not motion.stalled(1000.0)

    motion.pulse(1, 0, False, 1000.0)

    assert not motion.stalled(1010.0)
    assert motion.stalled(1010.1)


def test_a_gang_that_has_ended_is_not_stalled() -> None:
    motion = gang()
    motion.ended(0)
    assert motion.stalled(11.0)

    motion.ended(1)

    assert not motion.stalled(11.0)


def test_those_who_do_not_wait_are_missing() -> None:
    motion = gang(3)
    for rank, waiting in enumerate([True, False, True]):
        motion.pulse(rank, 0, waiting, 10.0)

    assert motion.missing(10.5) == [1]


def test_all_are_missing_when_all_wait_and_when_none_does() -> None:
    motion = gang(2)
    assert motion.missing(0.5) == [0, 1]

    for rank in (0, 1):
        motion.pulse(rank, 0, True, 1.0)

    assert motion.missing(1.5) == [0, 1]


def test_what_a_silent_rank_said_last_does_not_count() -> None:
    motion = gang(2)
    motion.pulse(1, 0, True, 5.0)
    motion.pulse(0, 0, True, 10.0)

    assert motion.missing(10.0) == [1]


def test_ranks_beat_several_times_within_the_time_of_a_stall() -> None:
    assert beat_interval(2.0, 1800.0) == 2.0
    assert beat_interval(2.0, 4.0) == 1.0


DUMP = f"""main 0x00000002
Thread 0x00000001 (most recent call first):
  File "/lib/threading.py", line 629 in wait
  File "{KINDLER}/engine/worker.py", line 150 in _beat
  File "/lib/threading.py", line 982 in run

Thread 0x00000003 (most recent call first):
  File "/home/me/reader.py", line 7 in fetch
  File "/lib/threading.py", line 982 in run

Current thread 0x00000002 (most recent call first):
  File "/lib/threading.py", line 629 in wait
  File "/home/me/model.py", line 3 in forward
  File "{KINDLER}/train/loop.py", line 9 in run
  File "{KINDLER}/engine/worker.py", line 100 in run_child
"""


def test_the_users_part_of_the_main_thread_comes_first_and_our_own_threads_are_left_out() -> None:
    shown = readable(DUMP, source=lambda file, line: "self.event.wait()\n" if line == 3 else "")

    assert shown == (
        "  main thread (most recent call last):\n"
        '    File "/home/me/model.py", line 3, in forward\n'
        "      self.event.wait()\n"
        "  thread 0x00000003 (most recent call last):\n"
        '    File "/home/me/reader.py", line 7, in fetch'
    )


def test_a_main_thread_within_kindler_is_shown_from_where_its_work_begins() -> None:
    dump = DUMP.replace('  File "/home/me/model.py", line 3 in forward\n', "")

    assert "line 9, in run" in readable(dump)
    assert "run_child" not in readable(dump)


def test_text_that_is_no_dump_is_shown_as_it_is() -> None:
    assert readable("main 0x1\n<no Python frame>") == "<no Python frame>"
