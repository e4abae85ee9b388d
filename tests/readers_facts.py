"""What is true of readers on every engine; the test file of an engine subclasses `ReaderFacts`.

References are pandas, pyarrow and Pillow on the same files, read one after the other.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pandas.testing import assert_frame_equal
from PIL import Image

import kindler
from kindler import tfrecord
from kindler.errors import DataError


def write(folder: Path, **contents: str) -> Path:
    """Files of these names, with the ending .csv."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def pixels(seed: int, height: int = 4, width: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def save_image(path: Path, values: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path


class ReaderFacts:
    """The facts; subclasses have a fixture `engine`."""

    def test_options_mean_what_they_mean_to_pandas(self, engine: str, tmp_path: Path) -> None:
        first = "# a note\nid;when;amount;note\n1;2024-01-01;1,5;ü\n2;2024-01-02;-;\n"
        second = "id;when;amount;note\n9007199254740993;2024-02-29;2,5;x;\n".replace("x;", "x")
        folder = write(tmp_path / "in", a=first, b=second)
        options = {
            "sep": ";",
            "comment": "#",
            "decimal": ",",
            "na_values": ["-"],
            "parse_dates": ["when"],
            "usecols": lambda name: name != "note",
            "dtype": {"id": "int64"},
        }
        shards = kindler.read_csv(folder, engine=engine, **options)

        assert (shards.engine, shards.num_partitions(), len(shards)) == (engine, 2, 3)
        for shard, file in zip(shards.collect(), sorted(folder.iterdir()), strict=True):
            assert_frame_equal(shard, pd.read_csv(file, **options))

    def test_columns_of_all_files_have_one_order_and_the_dtypes_of_concat(
        self, engine: str, tmp_path: Path
    ) -> None:
        texts = {
            "a": "",
            "b": "n,s,flag,other\n",
            "c": "n,s,flag,other\n1,x,True,1\n2,y,False,2\n",
            "d": "s,n,flag,other\nz,0.5,True,a\n",
            "e": "n,s,flag,other\n,,,\n",
        }
        folder = write(tmp_path / "in", **texts)
        shards = kindler.read_csv(folder, engine=engine)
        found = shards.collect()

        wanted = pd.concat([pd.read_csv(folder / f"{name}.csv") for name in "cde"], ignore_index=True)
        assert [len(shard) for shard in found] == [0, 0, 2, 1, 1]
        assert {tuple(shard.dtypes.items()) for shard in found} == {tuple(wanted.dtypes.items())}
        assert_frame_equal(shards.to_pandas().fillna("-"), wanted.fillna("-"))

    def test_a_file_with_other_columns_is_named_with_them(self, engine: str, tmp_path: Path) -> None:
        folder = write(tmp_path / "in", a="x,y\n1,2\n", b="x,z\n1,2\n")
        with pytest.raises(DataError, match=r"b\.csv lacks \['y'\] and also has \['z'\].*\['x', 'y'\]"):
            kindler.read_csv(folder, engine=engine)

    def test_a_file_that_cannot_be_parsed_is_named(self, engine: str, tmp_path: Path) -> None:
        folder = write(tmp_path / "in", a="x,y\n1,2\n", b="x,y\n1,2\n1,2,3\n")
        with pytest.raises(DataError, match=r"b\.csv: .*Expected 2 fields in line 3, saw 3"):
            kindler.read_csv(folder, engine=engine)

    def test_rows_are_dealt_out_evenly_on_request_and_counted_anew(self, engine: str, tmp_path: Path) -> None:
        folder = write(tmp_path / "in", a="x\n1\n", b="x\n2\n3\n4\n5\n")
        shards = kindler.read_csv([folder / "b.csv", folder / "a.csv"], engine=engine, num_shards=2)

        found = [shard.set_index(shard.index)["x"].to_dict() for shard in shards.collect()]
        assert found == [{0: 2, 1: 3, 2: 4}, {0: 5, 1: 1}]
        assert shards.to_pandas().index.tolist() == [0, 1, 2, 3, 4]

    def test_json_is_read_as_pandas_reads_it(self, engine: str, tmp_path: Path) -> None:
        for name, values in (("a", [1, 2]), ("b", [3.5])):
            frame = pd.DataFrame({"n": values, "s": ["ü"] * len(values)})
            frame.to_json(tmp_path / f"{name}.json", orient="records", lines=True)
        shards = kindler.read_json(str(tmp_path / "*.json"), engine=engine, lines=True)

        assert shards.to_pandas().to_dict("list") == {"n": [1.0, 2.0, 3.5], "s": ["ü"] * 3}
        with pytest.raises(DataError, match=r"a\.json: Trailing data\nHint: .*lines=True"):
            kindler.read_json(tmp_path / "a.json", engine=engine)

    def test_one_parquet_file_is_cut_by_rows(self, engine: str, tmp_path: Path) -> None:
        table = pa.table({"n": range(10), "v": [[i, i + 0.5] for i in range(10)], "s": list("abcdefghij")})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
        shards = kindler.read_parquet(tmp_path / "a.parquet", ["s", "n"], engine=engine, num_shards=3)

        assert [shard.to_dict("list") for shard in shards.collect()] == [
            {"s": list("abcd"), "n": [0, 1, 2, 3]},
            {"s": list("efg"), "n": [4, 5, 6]},
            {"s": list("hij"), "n": [7, 8, 9]},
        ]

    def test_parquet_files_get_the_wider_types_or_those_asked_for(self, engine: str, tmp_path: Path) -> None:
        pq.write_table(pa.table({"n": pa.array([1, None], pa.int32()), "k": [1, 2]}), tmp_path / "a.parquet")
        pq.write_table(pa.table({"n": [0.5], "k": [3]}), tmp_path / "b.parquet")
        shards = kindler.read_parquet(tmp_path, schema={"k": "float32"}, engine=engine)

        assert [str(dtype) for shard in shards.collect() for dtype in shard.dtypes] == [
            "float64",
            "float32",
        ] * 2
        assert shards.to_pandas()["n"].tolist() == pytest.approx([1.0, np.nan, 0.5], nan_ok=True)
        with pytest.raises(DataError, match=r"not among|there is no|lacks \['z'\]"):
            kindler.read_parquet(tmp_path, ["z"], engine=engine)

    def test_tfrecord_files_are_read_as_frames(self, engine: str, tmp_path: Path) -> None:
        table = pa.table({"n": [1, 2, 3], "v": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "s": ["a", "b", None]})
        tfrecord.write(table, tmp_path / "records", rows_per_file=2)
        shards = kindler.read_tfrecord(tmp_path / "records", columns=["s", "n", "v"], engine=engine)

        assert [shard["n"].tolist() for shard in shards.collect()] == [[1, 2], [3]]
        assert [cell.tolist() for cell in shards.to_pandas()["v"]] == [[1, 2], [3, 4], [5, 6]]
        assert shards.to_pandas()["s"].tolist() == ["a", "b", None]

    def test_images_have_the_number_of_their_folder(self, engine: str, tmp_path: Path) -> None:
        for i, name in enumerate(["dog/1.png", "cat/2.png", "cat/deep/3.png", "cat/notes.txt"]):
            file = save_image(tmp_path / name.replace(".txt", ".png"), pixels(i))
            if name.endswith(".txt"):
                file.rename(tmp_path / name)
        shards = kindler.read_images(tmp_path, engine=engine, num_shards=2, paths=True)

        first, second = shards.collect()
        assert [path.removeprefix(f"{tmp_path}/") for path in [*first["path"], *second["path"]]] == [
            "cat/2.png",
            "cat/deep/3.png",
            "dog/1.png",
        ]
        np.testing.assert_array_equal(first["x"], [pixels(1), pixels(2)])
        np.testing.assert_array_equal(second["x"], [pixels(0)])
        assert (first["y"].tolist(), second["y"].tolist(), first["y"].dtype) == ([0, 0], [1], np.int64)

    def test_images_of_different_sizes_are_refused_or_scaled(self, engine: str, tmp_path: Path) -> None:
        save_image(tmp_path / "a.png", pixels(0))
        save_image(tmp_path / "b.png", pixels(1, 8, 5))
        with pytest.raises(DataError, match=r"b\.png has 8 x 5 pixels, where .*a\.png has 4 x 6(.|\n)*size="):
            kindler.read_images(tmp_path, engine=engine, num_shards=2)

        (shard,) = kindler.read_images(tmp_path, size=(3, 2), mode="L", engine=engine, num_shards=1).collect()
        wanted = Image.fromarray(pixels(1, 8, 5)).convert("L").resize((2, 3), Image.Resampling.BILINEAR)
        assert (list(shard), shard["x"].shape) == (["x"], (2, 3, 2, 1))
        np.testing.assert_array_equal(shard["x"][1, :, :, 0], np.asarray(wanted))

    def test_a_file_that_is_no_image_is_named(self, engine: str, tmp_path: Path) -> None:
        save_image(tmp_path / "a.png", pixels(0))
        (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
        with pytest.raises(DataError, match=r"b\.png cannot be read as an image"):
            kindler.read_images(tmp_path, engine=engine, num_shards=1)
