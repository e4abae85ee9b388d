"""How many examples Hypothesis draws: 100 a test, its own number, only with `KINDLER_TEST_WHOLE=1`."""

from __future__ import annotations

from hypothesis import settings

from tests.whole import WHOLE

settings.register_profile("kindler", max_examples=100 if WHOLE else 30, deadline=None)
settings.load_profile("kindler")
