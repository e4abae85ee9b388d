"""Folders of zip files that modules were imported from."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from kindler.spark.tasks import forget_zip_folders


def test_folders_of_a_zip_are_forgotten_and_modules_are_still_found_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "modules.zip"
    with ZipFile(archive, "w") as file:
        for name in ("__init__", "first", "second"):
            file.writestr(f"zipped_for_a_test/{name}.py", f"name = {name!r}")
    monkeypatch.syspath_prepend(archive)
    folder = str(archive / "zipped_for_a_test")

    assert importlib.import_module("zipped_for_a_test.first").name == "first"
    assert folder in sys.path_importer_cache
    forget_zip_folders()

    assert folder not in sys.path_importer_cache
    assert importlib.import_module("zipped_for_a_test.second").name == "second"
    for name in [name for name in sys.modules if name.startswith("zipped_for_a_test")]:
        del sys.modules[name]
