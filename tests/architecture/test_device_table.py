"""What the GPU guide says of frameworks and kinds of models is what they say of themselves."""

from __future__ import annotations

from kindler.frameworks.registry import FRAMEWORKS
from kindler.sync.registry import SYNCS
from tests.docs import device_table


def test_the_tables_of_the_guide_are_up_to_date() -> None:
    page = device_table.GUIDE.read_text()
    assert page == device_table.updated(page), "run: python -m tests.docs.device_table"


def test_no_framework_and_no_sync_is_left_out() -> None:
    assert set(device_table._TITLES) == {spec.name for spec in FRAMEWORKS.built_in}
    assert set(device_table._ON_GPUS) == {spec.name for spec in SYNCS.built_in}
