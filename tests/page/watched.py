"""A page in a browser whose console is listened to, and a small trained model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HTML = "<img src=x onerror=alert(1)>"


@dataclass
class Watched:
    """A page of the server.

    Attributes:
        page: Playwright's.
        url: The server's address.
        refusals: Statuses that the test provokes; the browser's console tells of them.
    """

    page: Any
    url: str
    refusals: set[int] = field(default_factory=set)
    heard: list[str] = field(default_factory=list)

    @classmethod
    @contextmanager
    def opened(cls, browser: Any, url: str, **options: Any) -> Iterator[Watched]:
        """A page of its own; fails when its console told of an error."""
        context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        context.set_default_timeout(30_000)
        made = cls(context.new_page(), url)
        made.page.on("console", lambda said: made.heard.append(f"{said.type}: {said.text}"))
        made.page.on("pageerror", lambda error: made.heard.append(f"error: {error}"))
        try:
            yield made
        finally:
            context.close()
        assert not made.errors()

    def errors(self) -> list[str]:
        """What went wrong in the browser, beyond the refusals that the test provokes."""
        expected = [f"responded with a status of {status} " for status in self.refusals]
        told = [line for line in self.heard if line.startswith(("error", "warning"))]
        return [line for line in told if not any(words in line for words in expected)]

    def go(self, address: str) -> Any:
        """To a view; returns when it is there."""
        self.page.goto(f"{self.url}/#{address}")
        self.page.wait_for_selector("main:not([aria-busy]) h1")
        return self.page

    def cells(self, label: str) -> list[list[str]]:
        """The texts of a table, row by row."""
        rows = self.page.get_by_role("region", name=label).locator("tbody tr")
        return rows.evaluate_all(
            "rows => rows.map(row => [...row.cells].map(cell => cell.textContent.trim()))"
        )

    def numbers(self, label: str) -> list[list[float]]:
        """The numbers of a table in full, as they are shown when pointed at."""
        rows = self.page.get_by_role("region", name=label).locator("tbody tr")
        return rows.evaluate_all(
            "rows => rows.map(row => [...row.querySelectorAll('.number')].map(cell => Number(cell.title)))"
        )


@dataclass
class Trained:
    """The versions of the model `team/net`, and the epochs of each."""

    models: list[Any]
    histories: list[list[dict[str, Any]]]

    def answers(self, version: int, rows: Sequence[Sequence[float]]) -> Any:
        """What a version itself says."""
        import torch

        with torch.no_grad():
            return self.models[version - 1](torch.tensor(rows, dtype=torch.float32)).numpy()


def train_into(om: Any) -> Trained:
    """Trains for three epochs, then for two more; after each a version is stored."""
    import torch

    from kindler import Estimator

    x = np.random.default_rng(0).random((80, 4), np.float32)
    y = np.stack([x.sum(1), x[:, 0] - x[:, 1]], 1)
    estimator = Estimator.from_torch(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
        loss=torch.nn.MSELoss(),
        metrics=["mae"],
        workers=1,
        engine="local",
    )
    made = Trained([], [])
    for epochs, tag in ((3, "prod"), (2, None)):
        estimator.fit(
            {"x": x[:64], "y": y[:64]},
            epochs=epochs,
            batch_size=16,
            feature_cols=["x"],
            label_cols=["y"],
            validation_data={"x": x[64:], "y": y[64:]},
            verbose=0,
        )
        om.models.put(estimator, "team/net", tag=tag)
        made.models.append(copy.deepcopy(estimator.get_model()).eval())
        made.histories.append(list(estimator.history))
    return made
