"""The form of a text model shows the answer as it comes, and what `generate` answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kindler import Estimator, Store
from kindler.types import Sampling
from tests.page.watched import Watched
from tests.serve.served import Served, serving

pytest.importorskip("transformers")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from tiny_text import ending_tokenizer, generator  # noqa: E402

expect = sync_api.expect
PROMPT = "the film was quite"


@pytest.fixture(scope="module")
def writer(browser: object) -> Estimator:
    model = generator("llama", eos_token_id=None, context=4096)
    model.config.eos_token_id = None
    return Estimator.from_huggingface(
        model, ending_tokenizer(), task="text-generation", workers=1, device="cpu"
    )


@pytest.fixture(scope="module")
def writing(writer: Estimator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("writing") / "store"
    with Store(folder) as store:
        store.models.put(writer, "writer", tag="prod")
    with serving(folder, "--answer-tokens", "4000", "--timeout-s", "300") as served:
        yield served


def test_an_answer_is_that_of_generate_and_can_be_stopped(
    browser: Any, writing: Served, writer: Estimator
) -> None:
    with Watched.opened(browser, writing.url) as watched:
        page = watched.go("/b/default/models/writer")
        form, answer = page.get_by_role("form", name="Try it"), page.get_by_label("Answer")
        form.get_by_label("Prompt").fill(PROMPT)
        form.get_by_label("tokens").fill("12")
        form.get_by_role("button", name="Continue").click()
        expect(page.locator(".answered strong")).to_have_text("12 tokens")
        asked = {"sampling": Sampling(max_new_tokens=12), "verbose": 0}
        assert [answer.text_content()] == writer.generate({"prompt": [PROMPT]}, **asked)["generated"].tolist()

        form.get_by_label("tokens").fill("4000")
        form.get_by_role("button", name="Continue").click()
        expect(page.locator(".answered")).to_contain_text("first token after")
        form.get_by_role("button", name="Stop").click()
        expect(page.locator(".answered")).to_have_text("Stopped.")
        assert 1 <= len(answer.text_content().split()) < 4000
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
