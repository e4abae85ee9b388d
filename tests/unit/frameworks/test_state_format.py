"""A head and buffers as one run of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kindler.errors import ConfigError
from kindler.frameworks.state_format import is_packed, pack, unpack


@given(st.binary(max_size=50), st.lists(st.binary(max_size=30), max_size=5))
def test_what_was_packed_comes_back(head: bytes, buffers: list[bytes]) -> None:
    whole = b"".join(pack(head, buffers))

    found, views = unpack(whole)

    assert is_packed(whole)
    assert found == head
    assert [bytes(view) for view in views] == buffers


@pytest.mark.parametrize("cut", [1, 20, 40])
def test_a_part_of_it_is_refused(cut: int) -> None:
    whole = b"".join(pack(b"head", [b"some bytes", b"more of them"]))

    with pytest.raises(ConfigError, match="incomplete"):
        unpack(whole[:-cut])
