"""The page of a server that needs keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kindler.store.keys import Keys
from tests.page.watched import Watched
from tests.serve.served import Served

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
NET = "/b/default/models/net"


@pytest.fixture
def page(browser: Any, keyed: Served) -> Iterator[Watched]:
    with Watched.opened(browser, keyed.url) as made:
        made.refusals = {401}
        yield made


def sign_in(page: Watched, key: str) -> None:
    page.page.get_by_label("API key").fill(key)
    page.page.get_by_role("button", name="Sign in").click()


def test_without_a_key_there_is_a_form_and_a_wrong_key_is_told(page: Watched, keys: dict[str, str]) -> None:
    page.refusals = {401, 403}
    opened = page.go(NET)
    expect(opened.get_by_label("API key")).to_be_focused()

    sign_in(page, "kdl_0000_wrong")
    expect(opened.get_by_role("alert")).to_have_text("unknown or expired API key.")
    sign_in(page, keys["predict"])
    expect(opened.get_by_role("alert")).to_contain_text("has the scopes predict; this needs read.")

    sign_in(page, keys["read predict"])
    expect(opened.get_by_role("heading", name="net")).to_be_visible()
    kept = "[Object.values(sessionStorage), localStorage.length, document.cookie]"
    assert opened.evaluate(kept) == [[keys["read predict"]], 0, ""]
    opened.reload()
    expect(opened.get_by_role("heading", name="net")).to_be_visible()

    opened.get_by_role("button", name="Sign out").click()
    expect(opened.get_by_label("API key")).to_be_visible()
    assert opened.evaluate("sessionStorage.length") == 0


def test_a_key_without_admin_predicts_but_is_offered_no_alias_controls(
    page: Watched, keys: dict[str, str]
) -> None:
    opened = page.go(NET)
    sign_in(page, keys["read predict"])
    opened.get_by_role("button", name="Predict").click()
    expect(opened.locator(".answered")).to_contain_text("Version 1")
    expect(opened.get_by_role("region", name="Versions")).to_contain_text("prod")
    for name in ("Move", "Add", "Remove prod"):
        expect(opened.get_by_role("button", name=name, exact=True)).to_have_count(0)


def test_a_key_for_reading_is_told_that_it_does_not_predict_and_one_for_admin_has_the_controls(
    page: Watched, keys: dict[str, str]
) -> None:
    opened = page.go(NET)
    sign_in(page, keys["read"])
    expect(opened.get_by_text("lacks the scope predict.")).to_be_visible()
    opened.get_by_role("button", name="Sign out").click()
    sign_in(page, keys["admin"])
    expect(opened.get_by_role("button", name="Move", exact=True)).to_be_visible()
    expect(opened.get_by_role("button", name="Predict")).to_be_visible()


def test_a_key_that_is_taken_away_leads_back_to_the_form_and_what_is_typed_there_stays(
    page: Watched, keys: dict[str, str]
) -> None:
    known = Keys(keys["store"])
    key, token = known.add(["read"])
    opened = page.page
    opened.clock.install()
    page.go("/activity")
    sign_in(page, token)
    expect(opened.get_by_role("heading", name="Activity")).to_be_visible()

    known.remove(key.id)
    known.close()
    field = opened.get_by_label("API key")
    expect(field).to_be_visible()
    expect(opened.get_by_role("alert")).to_have_text("unknown or expired API key.")
    field.fill("typed")
    opened.clock.run_for(10_000)
    expect(field).to_have_value("typed")
