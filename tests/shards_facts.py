"""What is true of shards on every engine; the test file of an engine subclasses `ShardFacts`.

References are pandas and numpy on the same data, in one piece.
"""

from __future__ import annotations

import pickle
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal, assert_series_equal

from kindler import SharedValue, XShards
from kindler.errors import ConfigError, DataError

BIG = 2**53


def table(rows: int = 23) -> pd.DataFrame:
    """Values that row-wise conversions spoil: integers beyond 2**53, nulls, categories, times."""
    random = np.random.default_rng(0)
    number = np.arange(rows)
    return pd.DataFrame(
        {
            "key": pd.Series(["a", "b", None, "ü", ""] * rows, dtype=object)[:rows],
            "big": BIG + 1 + number * 2,
            "maybe": pd.array(np.where(number % 4 == 0, 0, BIG + 1 + number), dtype="Int64"),
            "real": np.where(number % 5 == 1, np.nan, random.normal(size=rows)),
            "kind": pd.Categorical.from_codes(number % 3, ["x", "y", "z"]),
            "when": pd.Timestamp("2024-02-29 12:00:00.000001") + pd.to_timedelta(number, "h"),
            "zone": pd.Timestamp("2024-03-31 00:30", tz="UTC") + pd.to_timedelta(number, "h"),
            "flag": number % 2 == 0,
            "small": (number % 7).astype(np.int8),
        }
    ).assign(maybe=lambda frame: frame["maybe"].mask(number % 4 == 0))


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """What a frame becomes on its way through SQL: categories are values, the index only counts."""
    frame = frame.reset_index(drop=True)
    for name in frame:
        if isinstance(frame[name].dtype, pd.CategoricalDtype) or frame[name].dtype == object:
            frame[name] = frame[name].astype(object).where(frame[name].notna(), None)
    return frame


def same(found: pd.DataFrame, wanted: pd.DataFrame) -> None:
    assert_frame_equal(found, plain(wanted))


class ShardFacts:
    """The facts; subclasses have a fixture `engine`."""

    @pytest.fixture(scope="class")
    @classmethod
    def frame(cls) -> pd.DataFrame:
        return table()

    @pytest.fixture(scope="class")
    @classmethod
    def shards(cls, frame: pd.DataFrame, engine: str) -> XShards:
        """Uneven shards, one of them empty."""
        cuts = [0, 5, 5, 6, len(frame)]
        parts = [frame.iloc[a:b] for a, b in pairwise(cuts)]
        return XShards.from_shards(parts, engine=engine)

    def test_partition_cuts_every_array_along_its_first_axis_as_numpy_does(self, engine: str) -> None:
        x, y = np.arange(22).reshape(11, 2), np.arange(11.0)
        shards = XShards.partition({"x": (x, [x * 2]), "y": y}, 3, engine=engine)

        assert (shards.engine, shards.num_partitions(), len(shards)) == (engine, 3, 11)
        for shard, a, b in zip(shards.collect(), np.array_split(x, 3), np.array_split(y, 3), strict=True):
            assert type(shard["x"]) is tuple
            assert type(shard["x"][1]) is list
            np.testing.assert_array_equal(shard["x"][0], a)
            np.testing.assert_array_equal(shard["x"][1][0], a * 2)
            np.testing.assert_array_equal(shard["y"], b)

    def test_every_dtype_and_structure_comes_back_as_it_was(self, engine: str) -> None:
        arrays = {
            "bool": np.array([True, False]),
            "half": np.ones((2, 3), np.float16),
            "complex": np.array([1j, 2]),
            "time": np.array(["2024-01-01", "NaT"], "datetime64[s]"),
            "text": np.array(["ab", "ü"]),
            "bytes": np.array([b"ab", b""]),
            "big endian": np.array([1, 2], ">i4"),
            "empty rows": np.empty((2, 0)),
            "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        }
        for name, array in arrays.items():
            (found,) = XShards.from_shards([{"a": array}], engine=engine).collect()
            np.testing.assert_array_equal(found["a"], array, err_msg=name)
            assert found["a"].dtype == array.dtype, name

    def test_any_object_that_pickles_can_be_a_shard(self, engine: str) -> None:
        things: list[Any] = [{"name": "a", "n": 1}, "text", None, {1, 2}, [1, "b"], np.float32(2), Path("a")]
        shards = XShards.from_shards(things, engine=engine)

        assert shards.collect() == things
        assert len(shards) == len(things) + 1  # the list has two rows

    def test_partition_of_a_frame_keeps_its_rows_types_and_index(self, engine: str) -> None:
        frame = table().set_index(pd.Index([f"r{i}" for i in range(23)], name="row"))
        shards = XShards.partition(frame, 4, engine=engine)

        assert_frame_equal(shards.to_pandas(), frame)
        assert [len(shard) for shard in shards.collect()] == [6, 6, 6, 5]

    def test_cells_that_no_table_can_hold_come_back_too(self, engine: str) -> None:
        frame = pd.DataFrame(
            {
                "mixed": [1, "a", None, 2.5],
                "ints": pd.Series([1, None, BIG + 1, 4], dtype=object),
                "lists": [[1], [], None, [2, 3]],
                "arrays": [np.arange(2), np.arange(3), np.arange(0), np.arange(1)],
                "dicts": [{"a": 1}, {"b": 2}, {}, None],
                3: [1, 2, 3, 4],
            }
        )
        found = XShards.partition(frame, 2, engine=engine).repartition(3).to_pandas()
        assert_frame_equal(found, frame)

    def test_arrays_of_different_lengths_are_refused_with_their_lengths(self, engine: str) -> None:
        with pytest.raises(ConfigError, match=r"data\['x'\] has 3, data\['y'\]\[0\] has 4"):
            XShards.partition({"x": np.zeros(3), "y": [np.zeros(4)]}, engine=engine)

    def test_more_shards_than_rows_are_refused(self, engine: str) -> None:
        with pytest.raises(ConfigError, match="received 3 rows for 4 shards(.|\n)*Hint: num_shards=3"):
            XShards.partition(np.zeros(3), 4, engine=engine)

    def test_no_shards_at_all_are_refused(self, engine: str) -> None:
        with pytest.raises(ConfigError, match="at least one object"):
            XShards.from_shards([], engine=engine)
        with pytest.raises(ConfigError, match="at least 1, received 0"):
            XShards.partition(np.zeros(3), 0, engine=engine)

    def test_data_without_rows_is_refused_with_where_it_is(self, engine: str) -> None:
        with pytest.raises(ConfigError, match=r"data\['n'\] has no rows(.|\n)*from_shards"):
            XShards.partition({"x": np.zeros(3), "n": 3}, engine=engine)

    def test_a_function_gets_each_shard_and_its_arguments(self, engine: str) -> None:
        shards = XShards.partition(np.arange(6), 3, engine=engine)
        found = shards.transform_shard(lambda shard, a, b: [*(shard * a).tolist(), b], 10, "end").collect()

        assert found == [[0, 10, "end"], [20, 30, "end"], [40, 50, "end"]]

    def test_a_function_may_change_its_shard_and_nobody_else_sees_it(self, engine: str) -> None:
        def zero(shard: Any) -> Any:
            shard["x"][:] = 0
            return shard

        shards = XShards.partition({"x": np.arange(4)}, 2, engine=engine)
        changed = shards.transform_shard(zero)

        assert [shard["x"].tolist() for shard in changed.collect()] == [[0, 0], [0, 0]]
        assert [shard["x"].tolist() for shard in shards.collect()] == [[0, 1], [2, 3]]

    def test_what_a_function_raises_arrives_as_that_exception_with_the_shard(self, engine: str) -> None:
        def fail(shard: Any) -> Any:
            if shard[0] >= 2:  # the first of two that fail is named
                raise KeyError("no such thing")
            return shard

        shards = XShards.partition(np.arange(6), 3, engine=engine)
        with pytest.raises(KeyError, match="no such thing(.|\n)*on shard 1") as caught:
            shards.transform_shard(fail)
        assert caught.value.shard == 1  # type: ignore[attr-defined]
        assert "Py4J" not in str(caught.value)

    def test_a_function_that_cannot_travel_is_refused(self, engine: str) -> None:
        shards, lock = XShards.partition(np.arange(2), 1, engine=engine), threading.Lock()
        with pytest.raises(ConfigError, match="cannot be sent to workers(.|\n)*lock"):
            shards.transform_shard(lambda shard: lock)
        with pytest.raises(ConfigError, match="an XShards cannot be sent to another process"):
            shards.transform_shard(lambda shard: len(shards))

    def test_a_shared_value_arrives_as_its_value(self, engine: str) -> None:
        names = SharedValue({0: "zero", 1: "one"})
        shards = XShards.partition(np.arange(2), 2, engine=engine)

        assert shards.transform_shard(lambda s, known: known[int(s[0])], names).collect() == ["zero", "one"]
        assert shards.transform_shard(lambda s: names.value[int(s[0])]).collect() == ["zero", "one"]
        names.unpersist()
        with pytest.raises(ConfigError, match="unpersisted"):
            shards.transform_shard(lambda s, known: known, names)

    def test_first_and_take_give_shards_in_order(self, engine: str) -> None:
        shards = XShards.partition(np.arange(6), 3, engine=engine)

        assert shards.first().tolist() == [0, 1]
        assert [shard.tolist() for shard in shards.take(2)] == [[0, 1], [2, 3]]
        assert len(shards.take(9)) == 3

    @pytest.mark.parametrize("count", [1, 3, 30])
    def test_repartition_is_balanced_and_keeps_values_types_and_order(
        self, shards: XShards, frame: pd.DataFrame, count: int
    ) -> None:
        again = shards.repartition(count)

        assert again.num_partitions() == count
        sizes = [len(shard) for shard in again.collect()]
        assert max(sizes) - min(sizes) <= 1
        assert_frame_equal(again.to_pandas(), frame)

    def test_repartition_of_arrays_moves_rows(self, engine: str) -> None:
        x = np.arange(20).reshape(10, 2)
        again = XShards.partition({"x": x, "y": [x[:, 0]]}, 4, engine=engine).repartition(3)

        assert [len(shard["x"]) for shard in again.collect()] == [4, 3, 3]
        np.testing.assert_array_equal(np.concatenate([s["x"] for s in again.collect()]), x)
        np.testing.assert_array_equal(np.concatenate([s["y"][0] for s in again.collect()]), x[:, 0])

    def test_repartition_of_objects_without_rows_moves_whole_shards(self, engine: str) -> None:
        shards = XShards.from_shards([{"a": 1}, {"a": 2}, {"a": 3}], engine=engine)

        assert shards.repartition(2).collect() == [[{"a": 1}, {"a": 2}], [{"a": 3}]]
        with pytest.raises(ConfigError, match="3 objects without rows"):
            shards.repartition(4)

    def test_categories_that_differ_between_shards_are_united(self, engine: str) -> None:
        parts = [pd.DataFrame({"c": pd.Categorical([value, "a"])}) for value in ("b", "c")]
        found = XShards.from_shards(parts, engine=engine).repartition(1).first()

        assert list(found["c"].cat.categories) == ["a", "b", "c"]
        assert found["c"].tolist() == ["b", "a", "c", "a"]

    @pytest.mark.parametrize("cols", ["maybe", ["kind", "key"], "when"])
    def test_partition_by_puts_all_rows_of_a_key_in_one_shard(
        self, shards: XShards, frame: pd.DataFrame, cols: Any
    ) -> None:
        parts = shards.partition_by(cols, num_partitions=3).collect()

        keys = [{tuple(row) for row in part[np.atleast_1d(cols)].astype(str).to_numpy()} for part in parts]
        assert len(parts) == 3
        assert not any(keys[i] & keys[j] for i in range(3) for j in range(i))
        assert_frame_equal(pd.concat(parts).sort_index(), frame)

    def test_split_and_zip_undo_each_other(self, engine: str) -> None:
        x, y = np.arange(6).reshape(6, 1), pd.DataFrame({"y": range(6)})
        shards = XShards.partition((x, y), 2, engine=engine)
        one, other = shards.split()
        again = one.zip(other)

        assert (one.num_partitions(), len(again)) == (2, 6)
        for (a, b), (c, d) in zip(shards.collect(), again.collect(), strict=True):
            np.testing.assert_array_equal(a, c)
            assert_frame_equal(b, d)

    def test_split_of_shards_of_different_lengths_is_refused(self, engine: str) -> None:
        with pytest.raises(DataError, match=r"must be tuples or lists of one length(.|\n)*\[1, 2\]"):
            XShards.from_shards([(1, 2), (1,)], engine=engine).split()

    def test_zip_of_unequal_collections_is_refused_with_the_sizes(self, engine: str) -> None:
        three = XShards.partition(np.arange(6), 3, engine=engine)
        with pytest.raises(ConfigError, match="same number of shards; received 3 and 2"):
            three.zip(XShards.partition(np.arange(6), 2, engine=engine))
        with pytest.raises(
            ConfigError, match="shard 0 must have the same number of rows in both; received 2 and 3"
        ):
            three.zip(XShards.partition(np.arange(9), 3, engine=engine))

    @pytest.mark.parametrize("column", ["key", "kind", "maybe"])
    def test_unique_gives_each_value_once_in_the_order_of_appearance(
        self, shards: XShards, frame: pd.DataFrame, column: str
    ) -> None:
        found = shards[column].unique()
        wanted = frame[column].drop_duplicates()

        assert [None if pd.isna(v) else v for v in found] == [None if pd.isna(v) else v for v in wanted]

    def test_deduplicates_keeps_the_first_of_equal_rows(self, engine: str) -> None:
        frame = pd.concat([table(7), table(5), table(7)])
        found = XShards.partition(frame, 3, engine=engine).deduplicates()

        same(found.to_pandas(), frame.drop_duplicates())

    @pytest.mark.parametrize(
        ("by", "ascending"),
        [("key", True), (["flag", "maybe"], [True, False]), ("zone", False)],
    )
    def test_sort_values_sorts_over_all_shards(
        self, shards: XShards, frame: pd.DataFrame, by: Any, ascending: Any
    ) -> None:
        found = shards.sort_values(by, ascending)

        assert 1 < found.num_partitions() <= 4
        same(found.to_pandas(), frame.sort_values(by, ascending=ascending, kind="stable"))

    def test_shards_whose_types_differ_go_together_where_values_do(self, engine: str) -> None:
        parts = [
            pd.DataFrame({"a": [2, 1], "b": ["x", None]}),
            pd.DataFrame({"a": [0.5], "b": [None]}),
            pd.DataFrame({"a": ["no rows"], "b": [1.0]}).head(0),
        ]
        found = XShards.from_shards(parts, engine=engine).sort_values("a").to_pandas()
        same(found, pd.DataFrame({"a": [0.5, 1, 2], "b": [None, None, "x"]}))

    def test_collections_without_rows_have_answers_too(self, engine: str) -> None:
        empty = XShards.from_shards(
            [pd.DataFrame({"a": np.empty(0), "s": np.empty(0, object)})], engine=engine
        )

        assert (len(empty), empty.max_values("a"), empty.num_partitions()) == (0, None, 1)
        for found in (empty.sort_values("a"), empty.deduplicates(), empty.merge(empty, on="a")):
            assert (len(found), found.num_partitions()) == (0, 1)
        assert list(empty.group_by("a", "max").to_pandas()) == ["a", "max(s)"]
        assert empty.group_by(agg={"a": ["count", "sum"]}).to_pandas().iloc[0].isna().tolist() == [
            False,
            True,
        ]

    def test_group_by_names_columns_as_spark_does_and_has_a_group_for_nulls(
        self, shards: XShards, frame: pd.DataFrame
    ) -> None:
        found = shards.group_by("key", {"big": ["sum", "max"], "real": "avg", "kind": "count_distinct"})
        wanted = frame.groupby("key", dropna=False, sort=True).agg(
            **{
                "sum(big)": ("big", "sum"),
                "max(big)": ("big", "max"),
                "avg(real)": ("real", "mean"),
                "count_distinct(kind)": ("kind", "nunique"),
            }
        )

        same(found.to_pandas(), wanted.reset_index())

    def test_group_by_one_function_takes_every_column_it_makes_sense_for(self, shards: XShards) -> None:
        found = shards.select(["key", "real", "big", "when"]).group_by("key", "sum").to_pandas()
        assert list(found) == ["key", "sum(real)", "sum(big)"]
        assert list(shards.group_by(["flag", "key"]).to_pandas()) == ["flag", "key", "count"]

    def test_group_by_nothing_is_one_group(self, shards: XShards, frame: pd.DataFrame) -> None:
        found = shards.group_by(agg={"real": ["stddev", "variance", "count"]}).to_pandas()
        assert found.iloc[0].tolist() == pytest.approx(
            [frame.real.std(), frame.real.var(), frame.real.count()]
        )

    def test_group_by_with_join_appends_to_the_rows(self, shards: XShards, frame: pd.DataFrame) -> None:
        found = shards.group_by("key", {"big": "min"}, join=True)
        same(
            found.to_pandas(),
            frame.assign(**{"min(big)": frame.groupby("key", dropna=False)["big"].transform("min")}),
        )

    def test_group_by_refuses_what_it_cannot_do(self, shards: XShards) -> None:
        with pytest.raises(ConfigError, match="no column 'nope'"):
            shards.group_by("nope")
        with pytest.raises(ConfigError, match="unknown aggregate 'mode'"):
            shards.group_by("key", "mode")
        with pytest.raises(ConfigError, match="sum needs numbers, and column 'kind'"):
            shards.group_by("key", {"kind": "sum"})
        with pytest.raises(ConfigError, match=r"cannot be computed for any of the columns \['kind'\]"):
            shards.select(["key", "kind"]).group_by("key", "sum")

    @pytest.mark.parametrize("how", ["inner", "left", "right", "outer"])
    def test_merge_joins_as_pandas_does(
        self, shards: XShards, frame: pd.DataFrame, engine: str, how: Any
    ) -> None:
        right = pd.DataFrame({"big": [BIG + 5, BIG + 1, BIG + 5, 1], "real": [0.0, 1, 2, 3], "n": range(4)})
        found = shards.merge(XShards.partition(right, 2, engine=engine), how=how, on="big").to_pandas()
        wanted = frame.merge(right, how=how, on="big")

        assert sorted(found) == sorted(wanted)
        order = ["big", "n"]
        found, wanted = (t.sort_values(order, ignore_index=True)[sorted(wanted)] for t in (found, wanted))
        assert_frame_equal(found, plain(wanted), check_dtype=False)
        assert found["big"].dtype == np.int64

    def test_merge_keeps_the_order_of_the_left_rows(self, shards: XShards, frame: pd.DataFrame) -> None:
        found = shards.merge(shards.select(["big", "small"]), on="big").to_pandas()
        assert found["big"].tolist() == frame["big"].tolist()
        assert [name for name in found if name.startswith("small")] == ["small_x", "small_y"]

    def test_sample_gives_the_share_asked_for_and_the_same_for_the_same_seed(self, shards: XShards) -> None:
        one, same_seed, other = (shards.sample(0.5, random_state=seed).to_pandas() for seed in (1, 1, 2))

        assert len(one) == 12
        assert one["big"].is_unique
        assert_frame_equal(one, same_seed)
        assert one["big"].tolist() != other["big"].tolist()
        assert len(shards.sample(2.0, replace=True)) == 46
        with pytest.raises(ConfigError, match="received 2"):
            shards.sample(2)

    def test_select_and_columns(self, shards: XShards, frame: pd.DataFrame) -> None:
        assert_frame_equal(shards.select(["real", "kind"]).to_pandas(), frame[["real", "kind"]])
        assert_series_equal(shards["real"].to_pandas(), frame["real"])
        assert_frame_equal(shards[["real"]].to_pandas(), frame[["real"]])
        with pytest.raises(ConfigError, match="no column 'nope'"):
            shards.select("nope")
        with pytest.raises(ConfigError, match="no 'nope'"):
            shards["nope"]

    def test_a_key_of_dicts_is_a_collection_of_what_is_there(self, engine: str) -> None:
        shards = XShards.partition({"x": np.arange(4), "y": np.zeros(4)}, 2, engine=engine)
        assert [part.tolist() for part in shards["x"].collect()] == [[0, 1], [2, 3]]

    def test_describe_is_pandas_own_over_all_shards(self, shards: XShards, frame: pd.DataFrame) -> None:
        assert_frame_equal(shards.describe(["real", "small"]), frame[["real", "small"]].describe())
        assert list(shards.describe()) == ["big", "maybe", "real", "small"]
        with pytest.raises(ConfigError, match="column 'kind' is not numeric"):
            shards.describe("kind")

    @pytest.mark.parametrize("n", [0, 9, 100])
    def test_head_gives_rows_in_order_over_shards(self, shards: XShards, frame: pd.DataFrame, n: int) -> None:
        assert_frame_equal(shards.head(n), frame.head(n), check_index_type=False)

    def test_extremes_and_nulls_are_counted_over_all_shards(
        self, shards: XShards, frame: pd.DataFrame
    ) -> None:
        nulls = shards.get_null_sum()

        assert (shards.max_values("big"), shards.max_values("when")) == (frame.big.max(), frame.when.max())
        assert dict(zip(nulls["col"], nulls["total"], strict=True)) == frame.isna().sum().to_dict()
        assert_frame_equal(shards.drop_missing_value().to_pandas(), frame.dropna())

    def test_columns_are_assembled_to_matrices(self, shards: XShards, frame: pd.DataFrame) -> None:
        found = shards.assemble_feature_label_cols(["real", "small"], ["big"]).collect()

        x = np.concatenate([shard["x"] for shard in found])
        y = np.concatenate([shard["y"] for shard in found])
        assert (x.dtype, y.dtype, x.shape, y.shape) == (np.float32, np.int64, (23, 2), (23, 1))
        np.testing.assert_array_equal(x, frame[["real", "small"]].to_numpy(np.float32))
        np.testing.assert_array_equal(y[:, 0], frame["big"])

    def test_pairs_are_stacked_to_features_and_labels(self, engine: str) -> None:
        pairs = [(np.full((2, 2), i, np.float64), i) for i in range(4)]
        found = XShards.from_shards([pairs[:3], pairs[3]], engine=engine).stack_feature_labels().collect()

        assert [shard["x"].shape for shard in found] == [(3, 2, 2), (1, 2, 2)]
        assert found[0]["x"].dtype == np.float32
        assert [shard["y"].tolist() for shard in found] == [[0, 1, 2], [3]]

    def test_lazy_functions_wait_until_somebody_needs_the_shards(self, engine: str) -> None:
        def fail(shard: Any) -> Any:
            raise OSError("not yet")

        lazy = XShards.partition(np.arange(4), 2, engine=engine).to_lazy()
        waiting = lazy.transform_shard(lambda s: s + 1).transform_shard(lambda s: s * 10)

        assert not waiting.is_cached()
        assert waiting.compute().is_cached()
        assert [shard.tolist() for shard in waiting.collect()] == [[10, 20], [30, 40]]
        assert not waiting.uncache().is_cached()
        assert [shard.tolist() for shard in waiting.collect()] == [[10, 20], [30, 40]]
        failing = lazy.transform_shard(fail)
        with pytest.raises(OSError, match="not yet"):
            failing.collect()

    def test_what_is_computed_is_not_computed_again(self, engine: str) -> None:
        shards = XShards.partition(np.arange(4), 2, engine=engine)
        drawn = shards.transform_shard(lambda shard: np.random.default_rng().random(3))

        assert drawn.is_cached()
        np.testing.assert_array_equal(drawn.collect(), drawn.collect())

    def test_pickles_are_saved_and_loaded_by_who_trusts_them(self, engine: str, tmp_path: Path) -> None:
        things = [{"a": 1}, (np.arange(3), "b")]
        shards = XShards.from_shards(things, engine=engine).save_pickle(tmp_path / "saved")

        with pytest.raises(ConfigError, match="requires trusted=True(.|\n)*run any code"):
            XShards.load_pickle(tmp_path / "saved")
        again = XShards.load_pickle(tmp_path / "saved", trusted=True, engine=engine).collect()
        assert again[0] == things[0]
        np.testing.assert_array_equal(again[1][0], np.arange(3))
        with pytest.raises(ConfigError, match="already exists"):
            shards.save_pickle(tmp_path / "saved")
        shards.save_pickle(tmp_path / "saved", overwrite=True)

    def test_parquet_is_saved_and_loaded(
        self, shards: XShards, frame: pd.DataFrame, engine: str, tmp_path: Path
    ) -> None:
        shards.save_parquet(tmp_path / "rows")
        again = XShards.load_parquet(tmp_path / "rows", engine=engine)

        found = again.sort_values("big").to_pandas()
        same(found, frame.astype({"small": found["small"].dtype}))

    def test_operations_on_frames_say_what_they_got_instead(self, engine: str) -> None:
        arrays = XShards.partition({"x": np.arange(4)}, 2, engine=engine)
        for operation in (arrays.deduplicates, arrays.sort_values, arrays.get_null_sum, arrays.describe):
            with pytest.raises(DataError, match="expected pandas DataFrames; shard 0 is a dict"):
                operation()

    def test_the_schema_names_columns_and_arrays(self, shards: XShards, engine: str) -> None:
        assert shards.schema()["big"] == "int64"
        arrays = XShards.partition(
            {"x": [np.zeros((2, 3), np.float32)], "y": np.zeros(2, int)}, 2, engine=engine
        )
        assert arrays.schema() == {"x[0]": "float32 (3,)", "y": "int64"}

    def test_a_collection_is_not_sent_to_another_process(self, shards: XShards) -> None:
        with pytest.raises(TypeError, match="cannot be sent to another process"):
            pickle.dumps(shards)
