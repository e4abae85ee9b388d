"""Orca's sets of images: Parquet files, Pascal VOC, masks."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as arrow
import pytest
import torch

from kindler.compat.zoo.orca import data
from kindler.compat.zoo.orca.data.image import (
    ParquetDataset,
    read_parquet,
    read_voc,
    write_mnist,
    write_ndarrays,
    write_parquet,
)
from kindler.compat.zoo.orca.data.image.utils import DType, FeatureType, SchemaField
from kindler.compat.zoo.orca.data.image.voc_dataset import VOCDatasets

image = pytest.importorskip("PIL.Image")

BOX = "<bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox>"
THING = "<object><name>{}</name><difficult>{}</difficult>" + BOX + "</object>"


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """Six images of one shade each, in a folder for each of two classes."""
    for number, name in enumerate(("cats", "dogs")):
        (tmp_path / "animals" / name).mkdir(parents=True)
        for shade in range(3):
            pixels = np.full((4, 6, 3), 40 * number + shade, np.uint8)
            image.fromarray(pixels).save(tmp_path / "animals" / name / f"{shade}.png")
    return tmp_path / "animals"


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    """A VOCdevkit of two images; the second one has no annotation of its size."""
    year = tmp_path / "VOCdevkit" / "VOC2007"
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (year / folder).mkdir(parents=True)
    size = "<size><width>100</width><height>50</height></size>"
    things = THING.format("Dog", 1, 10, 5, 50, 25), THING.format("cat", 0, 0, 0, 100, 50)
    (year / "Annotations" / "a.xml").write_text(f"<annotation>{size}{''.join(things)}</annotation>")
    (year / "Annotations" / "b.xml").write_text(
        f"<annotation>{THING.format('ufo', 0, 1, 1, 2, 2)}</annotation>"
    )
    for name in ("a", "b"):
        image.new("RGB", (100, 50)).save(year / "JPEGImages" / f"{name}.jpg")
    (year / "ImageSets" / "Main" / "trainval.txt").write_text("a\nb\n")
    return year.parent


def shades(records: Any) -> list[int]:
    return [int(np.asarray(image.open(io.BytesIO(record["image"])))[0, 0, 0]) for record in records]


def test_folders_of_images_are_written_and_read_by_torch_in_shards_and_by_several_readers(
    animals: Path, tmp_path: Path
) -> None:
    path = f"file://{tmp_path}/set"
    write_parquet(
        "image_folder",
        path,
        directory=str(animals),
        label_map={"dogs": 7, "cats": 3},
        shuffle=False,
        block_size=2,
    )
    table = arrow.dataset(str(tmp_path / "set"), partitioning="hive").to_table().to_pylist()
    assert sorted(row["label"] for row in table) == [3, 3, 3, 7, 7, 7]
    assert json.loads((tmp_path / "set" / "_orca_metadata").read_text())["image"]["feature_type"] == {
        "__enum__": "FeatureType.IMAGE"
    }
    whole = list(read_parquet("dataloader", path, transforms=lambda row: (row["label"], row["label_str"])))
    assert [(int(label), name[0]) for label, name in whole] == [(3, "cats")] * 3 + [(7, "dogs")] * 3
    seen: list[int] = []
    for rank in range(3):
        loader = read_parquet("dataloader", path, config={"num_shards": 3, "rank": rank}, batch_size=None)
        seen += shades(loader)
    assert seen == [0, 1, 2, 40, 41, 42]
    for workers in (0, 2):
        batches = read_parquet(
            "dataloader",
            path,
            transforms=lambda row: row["label"],
            config={"num_workers": workers},
            batch_size=2,
        )
        assert sorted(torch.cat(list(batches)).tolist()) == [3, 3, 3, 7, 7, 7]
    with pytest.raises(RuntimeError, match="num_shards 4 with partitions 3"):
        read_parquet("dataloader", path, config={"num_shards": 4, "rank": 0})
    with pytest.raises(RuntimeError, match="label_map is not specified for format image_folder"):
        write_parquet("image_folder", path, directory=str(animals))
    with pytest.raises(RuntimeError, match="should be 'tf_dataset' or 'dataloader'"):
        read_parquet("pandas", path)


def test_arrays_and_files_of_mnist_come_back_and_a_shorter_set_replaces_a_longer_one(tmp_path: Path) -> None:
    pixels = np.arange(20 * 4, dtype=np.uint8).reshape(20, 2, 2)
    labels = np.arange(20, dtype=np.uint8)
    for name, array, kind in (("images", pixels, 2051), ("labels", labels, 2049)):
        shape = b"".join(int(n).to_bytes(4, "big") for n in array.shape)
        (tmp_path / name).write_bytes(kind.to_bytes(4, "big") + shape + array.tobytes())
    path = str(tmp_path / "set")
    write_mnist(str(tmp_path / "images"), str(tmp_path / "labels"), path, block_size=3)
    shards = ParquetDataset._read_as_xshards(path).collect()
    assert [len(shard["label"]) for shard in shards] == [3] * 6 + [2]  # in the order of their numbers
    np.testing.assert_array_equal(np.concatenate([shard["image"] for shard in shards])[..., 0], pixels)

    write_ndarrays(np.ones((4, 3), np.float32), np.arange(4, dtype=np.int32), path)
    (only,) = ParquetDataset._read_as_xshards(path).collect()
    assert only["image"].dtype == np.float32
    assert only["label"].tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="exists"):
        write_ndarrays(only["image"], only["label"], path, write_mode="error")
    with pytest.raises(RuntimeError, match="float64 is not supported"):
        write_ndarrays(np.ones((4, 3)), only["label"], path)
    with pytest.raises(RuntimeError, match="Invalid magic number 2049 in MNIST image file"):
        write_mnist(str(tmp_path / "labels"), str(tmp_path / "labels"), path)
    schema = {"id": SchemaField(FeatureType.SCALAR, DType.INT32, ())}
    with pytest.raises(RuntimeError, match="do not match schema fields .'id'."):
        ParquetDataset.write(path, [{"number": 1}], schema)


def test_boxes_of_pascal_voc_are_shares_of_their_image(voc: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'ufo' isn't included"):
        pairs = list(VOCDatasets(str(voc), [(2007, "trainval")], difficult=True))
    np.testing.assert_allclose(pairs[0][1], [[0.1, 0.1, 0.5, 0.5, 11, 1], [0, 0, 1, 1, 7, 0]])
    assert pairs[1][1].shape == (0, 6)
    with pytest.warns(UserWarning, match="'cat' isn't included"):
        picture, boxes = VOCDatasets(str(voc), [(2007, "trainval")], classes=["ufo", "dog"])[0]
    assert (picture.shape, boxes.tolist()) == ((50, 100, 3), [[pytest.approx(0.1)] * 2 + [0.5, 0.5, 1]])

    with pytest.warns(UserWarning, match="'ufo' isn't included"):
        write_parquet("voc", str(tmp_path / "set"), voc_root_path=str(voc), splits_names=[(2007, "trainval")])
    records = list(read_parquet("dataloader", str(tmp_path / "set"), batch_size=None))
    assert records[0]["image"] == Path(records[0]["image_id"]).read_bytes()
    assert [tuple(record["label"].shape) for record in records] == [(2, 5), (0, 5)]
    shards = read_voc(str(voc), split_names=[(2007, "trainval")], max_samples=1).collect()
    assert [(one.size, found.shape) for one, found in shards] == [((100, 50), (2, 5))]
    with pytest.raises(RuntimeError, match="there is no list of images .*VOC2009"):
        read_voc(str(voc))


def test_images_have_labels_of_their_paths_or_masks_of_the_same_place(animals: Path) -> None:
    shards = data.read_images(str(animals / "cats"), image_type=".png").collect()
    assert [np.asarray(one)[0, 0, 0] for one in shards] == [0, 1, 2]
    labelled = data.read_images(str(animals), lambda path: "dogs" in path, image_type=".png").collect()
    assert [label for _, label in labelled] == [False] * 3 + [True] * 3
    masked = data.read_images(
        str(animals / "cats"), target_path=str(animals / "dogs"), image_type=".png", backend="spark"
    ).collect()
    assert [(np.asarray(one)[0, 0, 0], np.asarray(mask)[0, 0, 0]) for one, mask in masked] == [
        (0, 40),
        (1, 41),
        (2, 42),
    ]
    (animals / "dogs" / "2.png").unlink()
    with pytest.raises(RuntimeError, match="should be the same; received 2 and 3"):
        data.read_images(str(animals / "cats"), target_path=str(animals / "dogs"), image_type=".png")
    with pytest.raises(RuntimeError, match="label_func should be None"):
        data.read_images(str(animals), len, target_path=str(animals), image_type=".png")
