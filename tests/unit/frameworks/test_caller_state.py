"""What models must not change of their caller is put back, one model after the other."""

from __future__ import annotations

import threading

from kindler.frameworks.caller_state import untouched


def test_models_are_made_by_one_thread_at_a_time() -> None:
    entered = threading.Event()

    def enter() -> None:
        with untouched():
            entered.set()

    other = threading.Thread(target=enter)
    with untouched():
        other.start()
        assert not entered.wait(0.2)
    other.join()
    assert entered.is_set()
