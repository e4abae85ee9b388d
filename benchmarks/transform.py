"""How fast do two workers decode and augment small PNGs, against a torch DataLoader with two processes?

Bytes of 32 x 32 PNGs (CIFAR-10 where it is there, else noise) in one Parquet file. Both sides decode with
Pillow, cut 32 x 32 out of 40 x 40 at random, mirror half of them, normalise to float32, and hand over batches
of 256. Kindler's side is an epoch of `fit` with a model of one number; the DataLoader's side is a loop over
the same rows, in memory, that does nothing with the batches. Seconds are those of the epoch, without start.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from _bench import ROOT, Report, arguments, rounds, seconds, workplace

from kindler import Prepare

BATCH = 256
MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)


def main() -> None:
    given = arguments(__doc__, repeats=5)
    count = 2_048 if given.quick else 20_480
    report = Report("transform", f"rows/s of decoding and augmenting {count:,} PNGs", quick=given.quick)
    with workplace() as folder:
        path, pngs, labels = _written(folder / "rows.parquet", count)
        estimator = _estimator()
        loader = _loader(pngs, labels)
        spent = rounds(
            {
                "torch DataLoader, 2 processes": lambda: seconds(lambda: _used_up(loader)),
                "kindler, 2 workers": lambda: _epoch(estimator, path),
            },
            repeats=given.repeats,
        )
    speed = {name: [count / s for s in values] for name, values in spent.items()}
    for name, values in speed.items():
        report.figure(name, values, "rows/s")
    report.ratio(
        "kindler / DataLoader",
        speed["kindler, 2 workers"],
        speed["torch DataLoader, 2 processes"],
        at_least=1.0,
    )
    report.finish(rows=count, batch_size=BATCH)


def _written(path: Path, count: int) -> tuple[Path, list[bytes], Any]:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    images, labels = _images()
    pngs = []
    for image in images[: min(count, len(images))]:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        pngs.append(file.getvalue())
    places = np.arange(count) % len(pngs)
    rows = [pngs[place] for place in places]
    table = pa.table({"png": pa.array(rows, pa.binary()), "label": pa.array(labels[places])})
    pq.write_table(table, path, row_group_size=2_048)
    return path, rows, labels[places]


def _images() -> tuple[Any, Any]:
    import numpy as np

    folder = ROOT.parent / "shared" / "data" / "cifar10-mini"
    files = sorted(folder.glob("data_batch_*.bin"))
    if not files:
        random = np.random.default_rng(0)
        return random.integers(0, 256, (4_096, 32, 32, 3), dtype=np.uint8), random.integers(0, 10, 4_096)
    records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3_073) for file in files])
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), records[:, 0].astype(np.int64)


def _estimator() -> Any:
    import torch
    from torch import nn

    from kindler import Estimator, RunSettings
    from kindler.data import images

    class Mean(nn.Module):
        """The cheapest model that looks at every batch."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(10))

        def forward(self, image: Any) -> Any:
            return image[:, 0, 0, :1] * self.weight

    model = Mean()
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=nn.CrossEntropyLoss(),
        workers=2,
        settings=RunSettings(threads=1),
        prepare=Prepare(
            transform=images.from_bytes(
                "png", crop=32, padding=4, flip=True, mean=MEAN, std=STD, channels="first"
            )
        ),
    )


def _epoch(estimator: Any, path: Path) -> float:
    history = estimator.fit(str(path), 1, BATCH, feature_cols="png", label_cols="label", verbose=0)
    return float(history["seconds"][0])


def _loader(pngs: list[bytes], labels: Any) -> Any:
    import numpy as np
    import torch
    from PIL import Image

    mean = np.array(MEAN, np.float32) * 255
    std = np.array(STD, np.float32) * 255

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(pngs)

        def __getitem__(self, row: int) -> Any:
            with Image.open(io.BytesIO(pngs[row])) as file:
                image = np.array(file)
            bordered = np.zeros((40, 40, 3), np.uint8)
            bordered[4:-4, 4:-4] = image
            top, left, mirror = torch.randint(9, (3,)).tolist()
            image = bordered[top : top + 32, left : left + 32]
            if mirror % 2:
                image = image[:, ::-1]
            made = (image.astype(np.float32) - mean) / std
            return torch.from_numpy(np.ascontiguousarray(made.transpose(2, 0, 1))), labels[row]

    return torch.utils.data.DataLoader(
        Rows(), batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True
    )


def _used_up(loader: Any) -> None:
    for _ in loader:
        pass


if __name__ == "__main__":
    main()
