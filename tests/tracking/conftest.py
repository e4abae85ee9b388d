"""One tracking server for all tests here."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.tracking.servers import tracking_server

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # before mlflow is imported


@pytest.fixture(scope="session")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tracking_server(tmp_path_factory.mktemp("mlflow")) as url:
        yield url
