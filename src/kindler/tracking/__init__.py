"""MLflow: runs of `fit` logged to a tracking server, and stored models as MLflow models.

Parts that need mlflow load with the first use of it.
"""

from importlib import metadata


def package_version(package: str) -> str:
    """The installed version of a distribution; empty if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
