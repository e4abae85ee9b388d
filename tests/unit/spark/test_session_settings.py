"""What `kindler.init` asks of Spark, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kindler.errors import ConfigError
from kindler.spark.session import SessionPlan, requested_settings, same_setting, session_plan

LOG4J = Path("/package/log4j2.properties")


def plan(
    environ: dict[str, str] | None = None, spark_home: Path = Path("/nowhere"), **arguments: Any
) -> SessionPlan:
    wanted = requested_settings(
        arguments.get("master"), arguments.get("cores"), arguments.get("memory"), arguments.get("conf")
    )
    return session_plan(wanted, environ or {}, log4j=LOG4J, spark_home=spark_home)


def test_by_default_all_cores_of_this_machine_are_used_over_loopback() -> None:
    made = plan()

    assert made.local
    assert made.needs_java
    assert made.settings["spark.master"] == "local[*]"
    assert made.settings["spark.driver.host"] == "127.0.0.1"
    assert made.settings["spark.driver.bindAddress"] == "127.0.0.1"
    assert made.settings["spark.sql.execution.arrow.pyspark.enabled"] == "true"
    assert made.settings["spark.ui.enabled"] == "false"


def test_the_time_zone_is_left_alone() -> None:
    assert not [key for key in plan().settings if "timeZone" in key]


@pytest.mark.parametrize(
    ("master", "cores", "settings"),
    [
        (None, 2, {"spark.master": "local[2]"}),
        ("local", 2, {"spark.master": "local[2]"}),
        ("local[*]", 2, {"spark.master": "local[2]"}),
        ("local[2]", 2, {"spark.master": "local[2]"}),
        ("local[3]", None, {"spark.master": "local[3]"}),
        ("spark://host:7077", 4, {"spark.master": "spark://host:7077", "spark.cores.max": "4"}),
        ("yarn", None, {"spark.master": "yarn"}),
        ("sc://host:15002", None, {"spark.remote": "sc://host:15002"}),
        (None, None, {}),
    ],
)
def test_master_and_cores_become_settings(
    master: str | None, cores: int | None, settings: dict[str, str]
) -> None:
    assert requested_settings(master, cores, None, None) == settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"master": "loca"}, r"master='loca'\): not a Spark master"),
        ({"master": "local[2]", "cores": 3}, "this master sets the cores"),
        ({"master": "yarn", "cores": 3}, r"spark\.executor\.instances"),
        ({"cores": 0}, r"cores=0\): cores must be a whole number of at least 1"),
        ({"cores": True}, r"cores=True"),
        ({"cores": "2"}, r"cores='2'"),
        ({"memory": "lots"}, r'memory=\'lots\'\): not a memory size.\nHint: write it as "512m"'),
        ({"memory": 4}, r"memory=4\)"),
        ({"conf": [("a", "b")]}, "expected a dict, received a list"),
        ({"master": "sc://host", "memory": "1g"}, "leave out memory"),
        ({"master": "sc://host", "cores": 1}, "leave out cores"),
    ],
)
def test_arguments_that_cannot_work_are_answered_with_what_would(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**arguments)


def test_memory_is_the_drivers() -> None:
    assert plan(memory="4G").settings["spark.driver.memory"] == "4g"


def test_the_callers_settings_win_and_are_written_as_spark_reads_them() -> None:
    made = plan(conf={"spark.ui.enabled": True, "spark.driver.host": "10.0.0.1", "spark.x": 3})

    assert made.settings["spark.ui.enabled"] == "true"
    assert made.settings["spark.driver.host"] == "10.0.0.1"
    assert made.settings["spark.x"] == "3"


def test_a_cluster_must_be_able_to_reach_the_driver() -> None:
    made = plan(master="spark://host:7077")

    assert not made.local
    assert "spark.driver.host" not in made.settings


def test_the_quiet_log_is_added_to_the_callers_java_options() -> None:
    made = plan(conf={"spark.driver.extraJavaOptions": "-Dx=1"})

    assert made.quiet
    assert (
        made.settings["spark.driver.extraJavaOptions"]
        == "-Dx=1 -Dlog4j2.configurationFile=file:///package/log4j2.properties"
    )


def test_a_logging_configuration_of_the_callers_own_is_kept() -> None:
    option = "-Dlog4j2.configurationFile=file:/mine.xml"

    made = plan(conf={"spark.driver.extraJavaOptions": option})

    assert not made.quiet
    assert made.settings["spark.driver.extraJavaOptions"] == option


@pytest.mark.parametrize(
    ("name", "text"),
    [("log4j2.properties", ""), ("spark-defaults.conf", "spark.driver.extraJavaOptions -Dsite=1\n")],
)
def test_an_installation_with_options_of_its_own_keeps_them(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / name).write_text(text)

    by_home = plan(spark_home=tmp_path)
    by_variable = plan({"SPARK_CONF_DIR": str(tmp_path / "conf")})

    assert not by_home.quiet
    assert not by_variable.quiet
    assert "spark.driver.extraJavaOptions" not in by_home.settings


def test_a_connect_server_gets_only_the_callers_settings() -> None:
    made = plan(master="sc://host:15002", conf={"spark.sql.shuffle.partitions": 2})

    assert made.remote == "sc://host:15002"
    assert made.settings == {"spark.sql.shuffle.partitions": "2"}
    assert not made.needs_java


def test_the_variable_for_connect_is_followed_unless_a_master_is_named() -> None:
    environ = {"SPARK_REMOTE": "sc://other"}

    assert plan(environ).remote == "sc://other"
    assert plan(environ, master="local[1]").remote is None


def test_a_local_connect_server_needs_java_and_stays_on_this_machine() -> None:
    made = plan({"SPARK_REMOTE": "local[2]"})

    assert made.needs_java
    assert made.local
    assert (made.settings["spark.master"], made.settings["spark.api.mode"]) == ("local[2]", "connect")


def test_under_spark_submit_the_master_and_the_jvm_are_given() -> None:
    made = plan({"PYSPARK_GATEWAY_PORT": "1234"})

    assert not made.needs_java
    assert made.settings == {"spark.sql.execution.arrow.pyspark.enabled": "true"}


@pytest.mark.parametrize(
    ("key", "one", "other", "same"),
    [
        ("spark.driver.memory", "1g", "1024m", True),
        ("spark.driver.memory", "1g", "2g", False),
        ("spark.driver.memory", "512", "512m", True),
        ("spark.ui.enabled", "true", "True", True),
        ("spark.app.name", "A", "a", False),
        ("spark.x", "1", None, False),
    ],
)
def test_values_that_mean_the_same_are_the_same(key: str, one: str, other: str | None, same: bool) -> None:
    assert same_setting(key, one, other) is same
