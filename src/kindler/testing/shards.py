"""The contract of `ShardBackend` as tests. A backend's test file subclasses `ShardBackendContract`:

    class TestMyShards(ShardBackendContract):
        @pytest.fixture
        def put(self) -> Put:
            return MyShards.of

References are pandas and numpy on the same rows in one piece.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from kindler.data.shards import frames
from kindler.data.shards.backend import ShardBackend
from kindler.data.shards.codec import Packed, pack, unpack
from kindler.errors import ConfigError, WorkerError

Put: TypeAlias = Callable[[Iterable[Packed]], ShardBackend]
"""Makes the backend hold shards of this process."""

_BIG = 2**53  # beyond it, a float is not every integer


def _table() -> pd.DataFrame:
    number = np.arange(11)
    return pd.DataFrame(
        {
            "key": np.array(["b", "a", "c"])[number % 3].astype(object),
            "big": _BIG + 1 + (number * 7) % 11,
            "real": np.where(number % 4 == 1, np.nan, number / 2),
        }
    )


def _loaded(shards: ShardBackend) -> list[Any]:
    return [unpack(packed) for packed in shards.load(range(len(shards.infos)))]


def _whole(shards: ShardBackend) -> pd.DataFrame:
    return pd.concat(_loaded(shards), ignore_index=True)


def _numbered(number: int, packed: Packed) -> Packed:
    return pack(unpack(packed) * 10 + number)


def _raise_for_two(number: int, packed: Packed) -> Packed:
    if number == 2:
        raise ValueError(f"shard {number} is wrong")
    return packed


def _locked(lock: Any, number: int, packed: Packed) -> Packed:
    return packed


def _evens_and_odds(number: int, packed: Packed) -> Iterator[tuple[int, Packed]]:
    array = unpack(packed)
    for target in (0, 1):
        yield target, pack(array[array % 2 == target])


class ShardBackendContract:
    """What holds for shards wherever they are; a subclass gives the fixture `put`."""

    @pytest.fixture
    def put(self) -> Put:
        raise NotImplementedError("define the fixture `put`: packed shards -> the backend that holds them")

    @pytest.fixture
    def arrays(self, put: Put) -> ShardBackend:
        """The numbers 0 to 8 in shards of 4, 0, 2 and 3 rows."""
        return put(pack(np.arange(start, stop)) for start, stop in pairwise([0, 4, 4, 6, 9]))

    @pytest.fixture
    def table(self, put: Put) -> ShardBackend:
        """The rows of `_table` in shards of 5, 0 and 6 rows."""
        return put(pack(_table().iloc[start:stop]) for start, stop in pairwise([0, 5, 5, 11]))

    def test_infos_say_what_each_shard_is(self, arrays: ShardBackend, table: ShardBackend) -> None:
        assert [(info.kind, info.rows) for info in arrays.infos] == [("arrays", n) for n in (4, 0, 2, 3)]
        assert [(info.kind, info.rows) for info in table.infos] == [("frame", n) for n in (5, 0, 6)]

    def test_objects_of_any_kind_come_back_as_they_were(self, put: Put) -> None:
        things: list[Any] = [{"n": 1}, "text", None, {1, 2}, [1, "b"]]

        assert _loaded(put(map(pack, things))) == things

    def test_shards_are_loaded_in_the_order_asked_for(self, arrays: ShardBackend) -> None:
        loaded = [unpack(packed).tolist() for packed in arrays.load([3, 0, 1])]

        assert loaded == [[6, 7, 8], [0, 1, 2, 3], []]
        assert list(arrays.load([])) == []

    @pytest.mark.parametrize("by_user", [False, True])
    def test_work_gets_the_number_of_each_shard_and_makes_new_ones(
        self, arrays: ShardBackend, by_user: bool
    ) -> None:
        made = arrays.mapped(_numbered, by_user=by_user)

        assert made.engine == arrays.engine
        assert [array.tolist() for array in _loaded(made)] == [[0, 10, 20, 30], [], [42, 52], [63, 73, 83]]
        assert np.concatenate(_loaded(arrays)).tolist() == list(range(9)), "the old ones are as they were"

    def test_an_error_of_the_users_code_keeps_its_type_and_names_the_shard(
        self, arrays: ShardBackend
    ) -> None:
        with pytest.raises(ValueError, match=r"^shard 2 is wrong") as caught:
            arrays.mapped(_raise_for_two, by_user=True)

        assert isinstance(caught.value, WorkerError)
        assert caught.value.shard == 2

    def test_work_that_cannot_be_sent_is_refused(self, arrays: ShardBackend) -> None:
        with pytest.raises(ConfigError, match="cannot be sent to workers"):
            arrays.mapped(partial(_locked, threading.Lock()), by_user=True)

    def test_exchanged_pieces_come_in_the_order_of_their_shards(self, arrays: ShardBackend) -> None:
        made = arrays.exchanged(_evens_and_odds, 2)

        assert [array.tolist() for array in _loaded(made)] == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]

    def test_shards_of_the_same_number_are_paired(self, arrays: ShardBackend) -> None:
        pairs = _loaded(arrays.zipped(arrays.mapped(_numbered)))

        assert [(one.tolist(), two.tolist()) for one, two in pairs][2:] == [
            ([4, 5], [42, 52]),
            ([6, 7, 8], [63, 73, 83]),
        ]

    def test_rows_are_sorted_over_all_shards(self, table: ShardBackend) -> None:
        made = table.queried("sorted_rows", ["key", "big"], [False, True])

        assert_frame_equal(
            _whole(made), _table().sort_values(["key", "big"], ascending=[False, True], ignore_index=True)
        )

    def test_equal_rows_of_all_shards_are_one(self, put: Put) -> None:
        parts = [pd.DataFrame({"a": values}) for values in ([1, 2, 1], [2, 3])]

        assert sorted(_whole(put(map(pack, parts)).queried("distinct"))["a"]) == [1, 2, 3]

    def test_groups_span_shards_and_sums_are_exact(self, table: ShardBackend) -> None:
        made = _whole(
            table.queried(
                "grouped", ["key"], [frames.Aggregate("sum", "big"), frames.Aggregate("count")], False
            )
        )

        wanted = _table().groupby("key")["big"].agg(["sum", "count"]).reset_index()
        assert made.columns.tolist() == ["key", "sum(big)", "count"]
        assert made.to_numpy().tolist() == wanted.to_numpy().tolist()

    def test_rows_of_two_collections_are_joined_by_their_keys(self, put: Put, table: ShardBackend) -> None:
        names = pd.DataFrame({"key": ["a", "b"], "name": ["first", "second"]})
        right = put([pack(names.iloc[:1]), pack(names.iloc[1:])])
        made = _whole(
            table.queried(
                "merged", right, "inner", frames.merge_names(_table().columns, names.columns, "key")
            )
        )

        wanted = _table().merge(names, on="key")
        assert made.columns.tolist() == wanted.columns.tolist()
        assert sorted(made["big"].tolist()) == sorted(wanted["big"].tolist())
        assert dict(zip(made["big"], made["name"], strict=True)) == dict(
            zip(wanted["big"], wanted["name"], strict=True)
        )

    def test_numbers_are_described_over_all_shards(self, table: ShardBackend) -> None:
        assert_frame_equal(table.described(["real"]), _table()[["real"]].describe(), rtol=1e-12)

    def test_the_schema_is_that_of_all_shards_together(self, table: ShardBackend) -> None:
        assert {field.name: str(field.type) for field in frames.schema_of(table.infos)} == {
            "key": "string",
            "big": "int64",
            "real": "double",
        }

    def test_values_are_kept_until_they_are_freed(self, arrays: ShardBackend) -> None:
        assert arrays.is_kept
        arrays.free()
        assert not arrays.is_kept
