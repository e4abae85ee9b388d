"""The tables of the documentation that are made of all frameworks and kinds of models, plug-ins included."""

from __future__ import annotations

from kindler.frameworks.registry import FRAMEWORKS
from kindler.sync.registry import SYNCS
from tests.docs import device_table, support


def test_the_tables_of_the_gpu_guide_are_up_to_date() -> None:
    page = device_table.GUIDE.read_text()
    assert page == device_table.updated(page), "run: python -m tests.docs.device_table"


def test_no_framework_and_no_sync_is_left_out() -> None:
    assert set(device_table._TITLES) == set(support.FRAMEWORKS_IN_WORDS) == set(FRAMEWORKS.names)
    assert set(device_table._ON_GPUS) == {spec.name for spec in SYNCS.built_in}


def test_the_page_of_what_works_with_what_is_made_of_the_code() -> None:
    assert support.PAGE.read_text() == support.text(), "run: python -m tests.docs.support"


_TORCH = "PyTorch, Hugging Face"


def test_only_pytorch_divides_its_optimizer_and_own_steps_only_all_reduce() -> None:
    section = support.text().split("## Training", 1)[1].split("\n## ", 1)[0]
    head, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    refused = {
        row[0]: {name for name, can in zip(head[1:], row[1:], strict=True) if can == "no"} for row in rows
    }

    assert len(rows) == 6
    assert len(head) == 1 + 5
    dividing = {'`"zero1"`', '`"fsdp"`'}
    own = {'`"async"`', '`"local_sgd"`', *dividing}
    assert [refused.pop(name) for name in (_TORCH, "PyTorch with your own training step")] == [set(), own]
    assert refused.pop("LightningModules") == own
    assert set(map(frozenset, refused.values())) == {frozenset(dividing)}
