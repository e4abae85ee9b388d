"""Of packages that load models, no release may be admitted that has an advisory about that."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

# Releases that an advisory names, and the first one without any.
ADVISED = {
    # CVE-2025-1550, -8747, -9905, -9906, -12058, -12060, -12638, CVE-2026-0897, -1462, -1669
    "keras": (["3.5.0", "3.8.0", "3.11.3", "3.12.0", "3.13.0", "3.13.1"], "3.13.2"),
    # CVE-2025-54412, -54413, -54886
    "skops": (["0.10", "0.11.0", "0.12.0"], "0.13.0"),
    # CVE-2025-32434, CVE-2026-24747
    "torch": (["2.4.0", "2.5.1", "2.6.0", "2.9.1"], "2.10.0"),
    # Tensors that lie outside of the model's folder.
    "onnxruntime": (["1.17.0", "1.22.0", "1.26.0"], "1.27.0"),
    # CVE-2024-27318, CVE-2025-51480, CVE-2026-27489, -28500, -34445, -34446, -34447
    "onnx": (["1.16.0", "1.18.0", "1.20.1"], "1.21.0"),
}


@pytest.fixture(scope="module")
def requirements() -> list[Requirement]:
    tomllib: Any = pytest.importorskip("tomllib")
    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return [Requirement(text) for extra in extras.values() for text in extra]


@pytest.mark.parametrize("package", ADVISED)
def test_releases_with_an_advisory_are_not_admitted(package: str, requirements: list[Requirement]) -> None:
    asked = [one for one in requirements if one.name == package]
    assert asked
    advised, first = ADVISED[package]
    for requirement in asked:
        assert [old for old in advised if Version(old) in requirement.specifier] == []
        assert Version(first) in requirement.specifier


@pytest.mark.parametrize("package", ADVISED)
def test_what_is_installed_is_admitted(package: str, requirements: list[Requirement]) -> None:
    try:
        installed = Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert all(installed in one.specifier for one in requirements if one.name == package)
