"""A real browser, and a real server on a store whose models were trained."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kindler import Store
from kindler.store.keys import Keys
from tests.page.watched import HTML, Trained, Watched, train_into
from tests.serve.served import Served, constant, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[sync_api.Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    sync_api.expect.set_options(timeout=30_000)  # a busy machine takes its time
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="session")
def frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "x": [0.1, -1.5e-7, 1234567.891, np.pi],
            "id": [2**60, 2**60 + 1, -(2**61), 0],
            "text": ["plain", HTML, None, "&amp;"],
            HTML: [True, False, True, True],
        }
    )


@pytest.fixture(scope="session")
def store(browser: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Depends on the browser, so that nothing is trained where there is none."""
    return tmp_path_factory.mktemp("page") / "store"


@pytest.fixture(scope="session")
def net(store: Path) -> Trained:
    om = Store(store)
    made = train_into(om)
    om.close()
    return made


@pytest.fixture(scope="session")
def server(net: Trained, frame: pd.DataFrame, store: Path) -> Iterator[Served]:
    om = Store(store)
    om.models.put(net.models[0], "it's &lt;b&gt; = (1)", attributes={"note": HTML, HTML: 1})
    om["live"].models.put(constant(1.0), "only/here")
    om.datasets.put(frame, "of/0")
    om.datasets.put(np.arange(24.0).reshape(12, 2), "matrix")
    om.datasets.put({"x": np.arange(3.0), "y": np.zeros((2, 2, 2))}, "arrays")
    om.close()
    with serving(store) as served:
        yield served


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Keys by their scopes, of a store with one model; its folder is under "store"."""
    folder = tmp_path_factory.mktemp("keys") / "store"
    om = Store(folder)
    curves = {"loss": [0.5, 0.25], "val_loss": [0.75]}
    om.models.put(constant(7.0), "net", tag="prod", attributes={"history": curves})
    om.close()
    known = Keys(str(folder))
    made = {scopes: known.add(scopes.split())[1] for scopes in ("read", "read predict", "predict", "admin")}
    known.close()
    return {"store": str(folder), **made}


@pytest.fixture(scope="session")
def keyed(keys: dict[str, str]) -> Iterator[Served]:
    """A server that needs them."""
    with serving(keys["store"]) as served:
        yield served


@pytest.fixture
def page(browser: sync_api.Browser, server: Served) -> Iterator[Watched]:
    with Watched.opened(browser, server.url) as made:
        yield made
