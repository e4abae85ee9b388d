"""How many tokens a second does bucketing train, against padding every row to the longest?

Rows of 8 to 512 tokens, uniformly, in one Parquet file; a small transformer; two workers, batches of 64. One
side pads all rows to 512 (`pad=512`), the other to the longest of a batch of similar lengths (`pad="batch",
length_col="tokens"`). Tokens are those of the rows, not of the padding; seconds are those of the epoch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _bench import Report, arguments, rounds, workplace

from kindler import Prepare

BATCH, LEAST, MOST, WORDS = 64, 8, 512, 1_000


def main() -> None:
    given = arguments(__doc__, repeats=5)
    count = 256 if given.quick else 4_096
    report = Report(
        "ragged", f"tokens/s of training on {count:,} rows of {LEAST} to {MOST}", quick=given.quick
    )
    with workplace() as folder:
        path, tokens = _written(folder / "rows.parquet", count)
        ways = {
            "padded to the longest": _estimator(prepare=Prepare(pad=MOST)),
            "bucketed": _estimator(prepare=Prepare(pad="batch", length_col="tokens")),
        }
        spent = rounds(
            {name: lambda estimator=estimator: _epoch(estimator, path) for name, estimator in ways.items()},
            repeats=given.repeats,
            warm_up=not given.quick,
        )
    speed = {name: [tokens / s for s in values] for name, values in spent.items()}
    for name, values in speed.items():
        report.figure(name, values, "tokens/s")
    report.ratio("bucketed / padded", speed["bucketed"], speed["padded to the longest"], at_least=1.5)
    report.finish(rows=count, batch_size=BATCH, tokens=tokens)


def _written(path: Path, count: int) -> tuple[Path, int]:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    lengths = random.integers(LEAST, MOST + 1, count)
    rows = [random.integers(1, WORDS, length) for length in lengths]
    labels = np.array([int(row.mean() > WORDS / 2) for row in rows])
    pq.write_table(pa.table({"tokens": pa.array(rows), "label": pa.array(labels)}), path)
    return path, int(lengths.sum())


def _estimator(**padding: Any) -> Any:
    import torch
    from torch import nn

    from kindler import Estimator, RunSettings

    class Reader(nn.Module):
        """Reads tokens with one layer of attention and tells two classes apart."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, 64, padding_idx=0)
            self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
            self.out = nn.Linear(64, 2)

        def forward(self, tokens: Any, mask: Any) -> Any:
            read = self.layer(self.words(tokens), src_key_padding_mask=~mask) * mask[:, :, None]
            return self.out(read.sum(1) / mask.sum(1, keepdim=True))

    torch.manual_seed(0)
    model = Reader()
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=nn.CrossEntropyLoss(),
        workers=2,
        settings=RunSettings(threads=1),
        **padding,
    )


def _epoch(estimator: Any, path: Path) -> float:
    history = estimator.fit(str(path), 1, BATCH, feature_cols="tokens", label_cols="label", verbose=0)
    return float(history["seconds"][0])


if __name__ == "__main__":
    main()
