"""A real server on a store with a few small models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression

import tests.few_examples  # noqa: F401
from kindler import Store
from tests.serve.served import NAMES, Served, X, constant, linear, serving


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "store"
    om = Store(folder)
    om.models.put(constant(1.0), "net")
    om.models.put(linear(), "net", tag="prod")
    om.models.put(LogisticRegression().fit(pd.DataFrame(X, columns=NAMES), X[:, 0] > 0), "team/frame")
    om.datasets.put(pd.DataFrame(X, columns=NAMES), "rows")
    om.datasets.put(X[:2], "two")
    om.scripts.put(os.path.basename, "code")
    om.close()
    return folder


@pytest.fixture(scope="session")
def server(store: Path) -> Iterator[Served]:
    with serving(store, "--model", "net", "--body-bytes", "1000000", "--rows", "1000") as served:
        yield served


@pytest.fixture(scope="session")
def client(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made
