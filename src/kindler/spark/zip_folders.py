"""Spares tasks of Spark the reading of zip files.

Spark's Python workers import pyspark from a zip file. In Spark 3.5 and 4.0 each task begins with a search for
changed files, in newer ones the first task of a worker: Python reads the list of files of a zip again for
each of its folders that something was imported from, about twenty times, a quarter of a second of computing.
"""

from __future__ import annotations

import sys
import zipimport


def forget_zip_folders() -> None:
    """Have Python read each zip file once only when it looks for changed files next; tasks call it."""
    for path, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimport.zipimporter) and importer.prefix:
            sys.path_importer_cache.pop(path, None)  # made again where something is imported from there
