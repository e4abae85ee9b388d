"""The code of the guide runs; pages of the other frameworks run in `tests/docs`, without MXNet."""

from __future__ import annotations

from typing import Any

from tests.checkout import ROOT
from tests.docs.pages import blocks

GUIDE = ROOT / "docs" / "guides" / "mxnet.md"


def test_the_guide_trains_and_every_function_gives_each_row_once() -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks(GUIDE.read_text()):
        exec(compile(block.code, f"{GUIDE.name}:{block.line}", "exec"), names)

    est, x, y = names["estimator"], names["x"], names["y"]
    assert est.evaluate(names["get_own_part"], verbose=0)["num_samples"] == 500
    assert est.evaluate({"x": x, "y": y}, verbose=0)["accuracy"] > 0.8
