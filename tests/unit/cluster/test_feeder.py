"""What a task that is run again sends to the nodes of a cluster."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from kindler.cluster.blocks import TRAIN, encode_batches, numbered, row_count
from kindler.cluster.feeder import _Links
from tests.cluster import programs
from tests.cluster.test_local import start


def test_a_task_that_is_run_again_sends_only_what_had_not_arrived() -> None:
    batches = pa.table({"x": np.arange(5000)}).to_batches(max_chunksize=500)
    blocks = list(numbered(encode_batches(batches)))

    with start(programs.add_up, 50) as running:
        feeder = running._feeder("input", TRAIN, None, pass_number=0)
        with _Links(feeder, batches[0].schema, partition=0, attempt=0) as links:
            for block in blocks[:20]:
                links.put(block)
            links.finish()
        again = feeder.push(batches, partition=0, attempt=1)
        assert not feeder.blocks_before(partition=1, attempt=1)
        feeder.push(batches, partition=1, attempt=0)  # comes late: the next attempt has begun
        feeder.push(batches, partition=1, attempt=1)

    assert again == 5000 - sum(map(row_count, blocks[:20]))
    assert sum(rows for rows, _, _ in running.return_values) == 10_000
    assert sum(total for _, total, _ in running.return_values) == 2 * sum(range(5000))
