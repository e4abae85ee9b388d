"""Contract suites: subclass one for a part of your own, and pytest checks that it keeps its promises."""

import pytest

pytest.register_assert_rewrite("kindler.testing.replicas", "kindler.testing.syncs")
