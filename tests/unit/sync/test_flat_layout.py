"""Every element of every array travels exactly once, in windows that are not too large."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kindler.sync.flat_layout import ALIGN_BYTES, plan

DTYPES = [np.dtype(name) for name in ("float16", "float32", "float64", "uint8", "complex128")]
LAYOUTS = st.lists(st.tuples(st.integers(0, 300), st.sampled_from(DTYPES)), max_size=8)


def _carrier(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if dtype == np.float16 else dtype


@given(LAYOUTS, st.sampled_from([64, 256, 1024]), st.sampled_from([0, ALIGN_BYTES]))
def test_pieces_of_windows_make_up_the_arrays(
    layout: list[tuple[int, np.dtype]], window_bytes: int, lead_bytes: int
) -> None:
    made = plan(layout, _carrier, window_bytes=window_bytes, lead_bytes=lead_bytes)

    seen: list[list[int]] = [[] for _ in layout]
    for window in made.windows:
        dtype = made.sections[window.section].dtype
        assert (window.stop - window.start) * dtype.itemsize <= window_bytes
        for piece in window.pieces:
            assert window.start + piece.at == made.places[piece.array].start + piece.start
            assert piece.at + piece.stop - piece.start <= window.stop - window.start
            seen[piece.array] += range(piece.start, piece.stop)
    assert seen == [list(range(count)) for count, _ in layout]


@given(LAYOUTS)
def test_arrays_lie_apart_aligned_and_behind_the_lead(layout: list[tuple[int, np.dtype]]) -> None:
    made = plan(layout, _carrier, window_bytes=256, lead_bytes=ALIGN_BYTES)

    for (count, dtype), place in zip(layout, made.places, strict=True):
        section = made.sections[place.section]
        assert section.dtype == _carrier(dtype)
        assert place.start * section.dtype.itemsize >= ALIGN_BYTES
        assert place.start * section.dtype.itemsize % ALIGN_BYTES == 0
        assert place.stop - place.start == count
        assert place.stop <= section.count
    for one, other in zip(made.places, made.places[1:], strict=False):
        assert one.section != other.section or one.stop <= other.start


def test_windows_of_a_section_follow_each_other_without_a_gap() -> None:
    made = plan([(100, DTYPES[1]), (70, DTYPES[1])], _carrier, window_bytes=256)

    assert [(window.start, window.stop) for window in made.windows] == [(0, 64), (64, 128), (128, 182)]
