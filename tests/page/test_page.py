"""The web page in a real browser, against a real server."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest

from tests.page.watched import HTML, Trained, Watched
from tests.serve.served import Served

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
NET = "/b/default/models/team%2Fnet"
ODD = "it's &lt;b&gt; = (1)"
ROWS = [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]]


def predicted(page: Watched, target: str) -> tuple[str, Any]:
    """Asks through the form; the version that answered, and the numbers of its table."""
    page.page.get_by_label("Model", exact=True).select_option(target)
    page.page.get_by_role("button", name="Predict").click()
    expect(page.page.locator(".result:not([aria-busy]) .answered")).to_be_visible()
    return page.page.locator(".answered strong").text_content(), page.numbers("Result")


def test_models_are_listed_with_version_aliases_and_size_and_open(page: Watched, server: Served) -> None:
    told = httpx.get(f"{server.url}/api/v1/models").json()["models"]

    opened = page.go("/")
    rows = page.cells("Models")
    assert [row[0] for row in rows] == [model["name"] for model in told]
    assert rows[1][:4] == ["team/net", "2", "prod → 1", "estimator"]
    assert rows[1][4].endswith(" KiB")

    opened.get_by_role("link", name="team/net").click()
    expect(opened.get_by_role("heading", name="team/net")).to_be_visible()
    assert [row[:2] for row in page.cells("Versions")] == [["2", ""], ["1", "prod"]]
    expect(opened.get_by_role("region", name="Signature")).to_contain_text("float32")
    assert page.cells("Signature")[0] == ["in", "x", "float32", "[rows, 4]"]

    opened.go_back()
    expect(opened.get_by_role("heading", name="Models", exact=True)).to_be_visible()


def test_the_training_history_is_plotted_with_validation_beside_training(page: Watched, net: Trained) -> None:
    history = net.histories[1]
    opened = page.go(NET)

    loss = opened.locator("figure", has_text="loss").first
    points = loss.locator("path.curve").evaluate_all("all => all.map(one => one.getAttribute('d'))")[-2:]
    assert [path.count("L") + 1 for path in points] == [len(history), len(history)]
    heights = loss.locator("circle.first").evaluate_all(
        "all => all.map(one => Number(one.getAttribute('cy')))"
    )
    wanted = np.array([row["loss"] for row in history])
    np.testing.assert_allclose(np.corrcoef(heights, wanted)[0, 1], -1, atol=1e-6)  # a line, upside down
    assert loss.locator(".tick.x").all_text_contents() == ["1", "2", "3", "4", "5"]

    plot = loss.locator("svg.plot")
    plot.focus()
    for epoch in (1, 2):
        plot.press("ArrowRight")
        shown = loss.locator(".value").all_text_contents()
        row = history[epoch - 1]
        np.testing.assert_allclose([float(t) for t in shown], [row["loss"], row["val_loss"]], rtol=1e-5)
        expect(loss.locator(".where")).to_have_text(f"epoch {epoch}")
    box = plot.bounding_box()
    opened.mouse.move(box["x"] + box["width"] - 12, box["y"] + 60)
    expect(loss.locator(".where")).to_have_text("epoch 5")


def test_the_lineage_leads_from_the_data_to_the_requests(page: Watched) -> None:
    opened = page.go("/b/default/models/team%2Fnet/2")
    flows = opened.locator(".lineage .flow")

    assert flows.count() == 2  # a fit each
    assert flows.nth(0).locator("b").all_text_contents() == ["Data", "Fit", "Version"]
    assert flows.nth(1).locator("b").all_text_contents() == ["Data", "Fit", "Version", "Tags", "Requests"]
    expect(flows.nth(0)).to_contain_text("64 rows")
    expect(flows.nth(0)).to_contain_text("from a creator")
    expect(flows.nth(1)).to_contain_text("from team/net@1")
    expect(flows.nth(1)).to_contain_text("since the server started")


def test_a_moved_alias_changes_which_version_answers(page: Watched, net: Trained, server: Served) -> None:
    opened = page.go(NET)
    version, numbers = predicted(page, "@prod")
    assert version == "Version 1"
    np.testing.assert_allclose(numbers, net.answers(1, ROWS), rtol=1e-5)
    expect(opened.locator(".answered")).to_contain_text("ms")

    opened.get_by_label("Version for prod").select_option("2")
    opened.get_by_role("button", name="Move", exact=True).click()
    expect(opened.get_by_role("status").filter(has_text="prod now serves version 2.")).to_be_visible()
    expect(opened.get_by_role("region", name="Versions").locator("tr", has_text="prod")).to_contain_text("2")

    version, numbers = predicted(page, "@prod")
    assert version == "Version 2"
    np.testing.assert_allclose(numbers, net.answers(2, ROWS), rtol=1e-5)
    served = httpx.put(f"{server.url}/api/v1/model/team/net@prod/predict", json={"data": ROWS}).json()
    assert served["version"] == 2
    httpx.put(f"{server.url}/api/v1/model/team/net/tags/prod", json={"version": 1}).raise_for_status()


def test_a_tag_is_made_and_removed(page: Watched, server: Served) -> None:
    opened = page.go(NET)
    opened.get_by_label("New tag", exact=True).fill("canary")
    opened.get_by_role("button", name="Add", exact=True).click()
    expect(opened.get_by_label("Version for canary")).to_have_value("2")
    tags = f"{server.url}/api/v1/model/team/net"
    assert httpx.get(tags).json()["result"]["tags"] == {"canary": 2, "prod": 1}

    opened.on("dialog", lambda dialog: dialog.accept())
    opened.get_by_role("button", name="Remove canary").click()
    expect(opened.get_by_label("Version for canary")).to_have_count(0)
    assert httpx.get(tags).json()["result"]["tags"] == {"prod": 1}


def test_a_wrong_input_is_told_before_and_after_it_is_sent(page: Watched) -> None:
    page.refusals = {400}
    opened = page.go(NET)
    text, shape = opened.get_by_label("Input as JSON"), opened.locator("#try-shape")
    expect(shape).to_have_text("✓ [2, 4]")

    text.fill("[[1, 2]]")
    expect(shape).to_have_text("✗ [1, 2], not [rows, 4]")
    opened.get_by_role("button", name="Predict").click()
    expect(opened.locator(".result")).to_contain_text("has the shape [1, 2]; the model takes [rows, 4].")

    text.fill("[1, 2, 3, 4, 5, 6, 7, 8]")
    opened.get_by_role("button", name="Make it [2, 4]").click()
    expect(shape).to_have_text("✓ [2, 4]")
    opened.get_by_role("button", name="Predict").click()
    expect(opened.locator(".answered")).to_be_visible()


def test_a_preview_shows_the_rows_of_the_frame(page: Watched, frame: pd.DataFrame) -> None:
    opened = page.go("/b/default/datasets/of%2F0")

    expect(opened.locator(".facts")).to_contain_text("parquet")
    cells = page.cells("First rows")
    assert [float(value) for value in (row[0] for row in cells)] == pytest.approx(
        frame["x"].tolist(), rel=1e-5
    )
    assert [row[1] for row in cells] == [str(value) for value in frame["id"]]
    assert [row[2] for row in cells] == ["plain", HTML, "null", "&amp;"]
    assert [row[3] for row in cells] == ["true", "false", "true", "true"]

    page.go("/b/default/datasets/matrix")
    assert page.cells("First rows")[11] == ["22", "23"]
    page.go("/b/default/datasets/arrays")
    assert page.cells("First rows")[2] == ["2", ""]


def test_text_that_looks_like_html_stays_text(page: Watched) -> None:
    opened = page.go("/b/default/models/" + "it's %26lt%3Bb%26gt%3B %3D (1)".replace(" ", "%20"))
    expect(opened.get_by_role("heading", name=ODD, exact=True)).to_be_visible()
    assert opened.locator(".pairs").text_content() == f"{HTML}1note{HTML}"
    assert predicted(page, "")[0] == "Version 1"

    page.go("/b/default/datasets/of%2F0")
    assert HTML in opened.locator("th").last.text_content()
    assert opened.locator("main img, main b").count() == 0


def test_another_bucket_has_other_models_and_an_empty_one_says_what_to_do(page: Watched) -> None:
    opened = page.go("/")
    opened.get_by_label("Bucket").select_option("live")
    expect(opened.get_by_role("link", name="only/here")).to_be_visible()
    assert opened.url.endswith("#/b/live/models")

    page.go("/b/nothing/models")
    expect(opened.locator("main")).to_contain_text('om["nothing"].models.put(model, "first", tag="prod")')


def test_what_is_not_there_is_told_in_a_sentence(page: Watched) -> None:
    page.refusals = {404}
    opened = page.go("/b/default/models/nope")
    expect(opened.get_by_role("alert")).to_contain_text("there is no model in the bucket 'default': 'nope'.")
    page.go("/b/default/datasets/nope")
    expect(opened.get_by_role("alert")).to_contain_text("There is no dataset “nope”")


def test_activity_counts_requests_and_is_asked_for_only_while_it_is_visible(
    page: Watched, server: Served
) -> None:
    opened, asked = page.page, []
    opened.on(
        "request", lambda request: asked.append(request.url) if request.url.endswith("/stats") else None
    )
    for _ in range(3):
        httpx.put(f"{server.url}/api/v1/model/team/net@2/predict", json={"data": ROWS}).raise_for_status()
    opened.clock.install()
    page.go("/activity")
    expect(opened.get_by_role("region", name="Models in memory")).to_contain_text("team/net")
    expect(opened.locator(".tile", has_text="Latency p50")).to_contain_text("p99")
    expect(opened.locator("figure", has_text="Latency").locator("circle.first")).not_to_have_count(0)
    with opened.expect_request("**/api/v1/stats"):
        opened.clock.run_for(2_000)

    see = "state => { Object.defineProperty(document, 'visibilityState', {value: state, configurable: true});"
    see += " document.dispatchEvent(new Event('visibilitychange')); }"
    opened.evaluate(see, "hidden")
    until_hidden = len(asked)
    opened.clock.run_for(60_000)
    assert len(asked) == until_hidden
    with opened.expect_request("**/api/v1/stats"):
        opened.evaluate(see, "visible")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_does_not_scroll_sideways_and_text_has_contrast(
    browser: Any, server: Served, scheme: str
) -> None:
    with Watched.opened(browser, server.url, color_scheme=scheme) as page:
        page.page.set_viewport_size({"width": 360, "height": 740})
        for address in ("/", NET, "/b/default/datasets", "/b/default/datasets/of%2F0", "/activity"):
            opened = page.go(address)
            if address == NET:
                predicted(page, "@2")
            assert opened.evaluate("document.documentElement.scrollWidth") == 360, address
        ratios = opened.evaluate(CONTRAST)
        assert min(ratios.values()) >= 4.5, ratios


CONTRAST = """() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const hex = style.getPropertyValue(name).trim().slice(1);
    const parts = hex.length === 3 ? [...hex].map((c) => c + c) : hex.match(/../g);
    const [r, g, b] = parts.map((c) => parseInt(c, 16) / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const pairs = [["--ink", "--page"], ["--quiet", "--page"], ["--quiet", "--card"], ["--quiet", "--soft"],
    ["--accent", "--card"], ["--accent", "--tint"], ["--on-accent", "--accent"], ["--bad", "--card"],
    ["--good", "--card"]];
  return Object.fromEntries(pairs.map(([a, b]) => [`${a} on ${b}`,
    Math.max(light(a), light(b)) / Math.min(light(a), light(b))]));
}"""
