"""What all unit tests share."""

from __future__ import annotations

import tests.few_examples  # noqa: F401
