"""Stores that are damaged, shared, read-only, large, full, or mistyped; and names that cannot work."""

from __future__ import annotations

import pytest

from kindler import Omega
from kindler.errors import ConfigError, NotFoundError


@pytest.mark.parametrize("tag", ["latest", "v1", "v0", "v12345678901234567890"])
def test_a_tag_that_would_never_be_found_is_refused(local: Omega, tag: str) -> None:
    local.datasets.put(1, "x")
    for call in (
        lambda: local.datasets.tag("x", tag),
        lambda: local.datasets.put(2, "x", mode="replace", tag=tag),
        lambda: local.datasets.promote("x", tag=tag),
        lambda: local.datasets.copy("x", "y", tag=["fine", tag]),
    ):
        with pytest.raises(ConfigError, match=rf"tag='{tag}' cannot be a tag: name@{tag} always means"):
            call()
    assert (local.datasets.list(), local.datasets.tags("x")) == (["x"], {})
    with pytest.raises(NotFoundError, match="tag of 'x'"):
        local.datasets.untag("x", tag)  # one from an earlier release can be taken away


@pytest.mark.parametrize("tag", ["v1.0", "version1", "V1", "latest-1", "vv1"])
def test_tags_that_only_look_like_versions_are_found(local: Omega, tag: str) -> None:
    local.datasets.put(1, "x", tag=tag)
    local.datasets.put(2, "x", mode="replace")
    assert local.datasets.get(f"x@{tag}") == 1


def test_promoting_into_the_same_bucket_needs_a_tag(local: Omega) -> None:
    local.datasets.put(1, "x")
    with pytest.raises(ConfigError, match="is in that bucket already"):
        local.datasets.promote("x", bucket="default")
    assert local.datasets.tags("x") == {}
    local.datasets.promote("x", bucket="default", tag="prod")
    assert local.datasets.tags("x") == {"prod": 1}
