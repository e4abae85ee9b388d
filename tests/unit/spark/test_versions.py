"""Old versions of pyspark are refused by their version, before anything of them is used."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import kindler
from kindler.errors import ConfigError
from kindler.estimator.inputs.recognise import recognise


@pytest.fixture
def old_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("pyspark")
    module.__version__ = "3.4.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark", module)


@pytest.mark.usefixtures("old_pyspark")
def test_init_refuses_an_old_pyspark() -> None:
    with pytest.raises(ConfigError, match=r"pyspark 3\.4\.1 is too old: Kindler needs Spark 3\.5 or newer"):
        kindler.init()


@pytest.mark.usefixtures("old_pyspark")
def test_the_first_frame_of_an_old_pyspark_is_refused() -> None:
    frame = type("DataFrame", (), {"__module__": "pyspark.sql.dataframe"})()

    with pytest.raises(ConfigError, match=r"a Spark DataFrame: pyspark 3\.4\.1 is too old"):
        recognise(frame)


def test_a_pyspark_without_the_setting_does_not_ignore_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("pyspark")
    module.__version__ = "3.5.6"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark", module)

    with pytest.raises(ConfigError, match=r"pyspark 3\.5 does not know this setting.*\n.*sc://"):
        kindler.init(conf={"spark.api.mode": "connect"})
