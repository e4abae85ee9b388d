"""Programs for the nodes of clusters in tests: `main_fun(args, ctx)`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any


def whoami(args: Any, ctx: Any) -> dict[str, Any]:
    names = ("TF_CONFIG", "MASTER_ADDR", "RANK", "WORLD_SIZE", "JAX_PROCESS_ID", "FROM_ENV")
    return {
        "args": args,
        "argv": sys.argv[1:],
        "rank": ctx.rank,
        "role": ctx.role,
        "index": ctx.task_index,
        "workers": ctx.num_workers,
        "spec": ctx.cluster_spec,
        "path": ctx.absolute_path("data"),
        "remote": ctx.absolute_path("s3://bucket/data"),
        "tmp": os.path.isdir(ctx.tmp),
        "environ": {name: os.environ[name] for name in names if name in os.environ},
    }


def add_up(args: Any, ctx: Any) -> tuple[int, int, list[int]]:
    """Rows, their sum, and the sizes of batches."""
    feed = ctx.data_feed(input_mapping={"x": "number"})
    total, sizes = 0, []
    while not feed.should_stop():
        batch = feed.next_batch(args)["number"]
        total += int(batch.sum())
        sizes.append(len(batch))
    return sum(sizes), total, sizes


def epochs(args: Any, ctx: Any) -> list[tuple[int, int, int]]:
    """For each epoch: its number, rows of the feed, and rows of the validation feed."""
    feed = ctx.data_feed()
    validation = ctx.data_feed("validation", input_mapping=["x"])
    seen = []
    for _ in range(args):
        number = feed.epoch
        rows = sum(len(batch) for batch in feed.batches(16))
        seen.append((number, rows, sum(len(batch["x"]) for batch in validation.batches(10))))
    return seen


def square(args: Any, ctx: Any) -> int:
    feed = ctx.data_feed()
    count = 0
    while not feed.should_stop():
        rows = feed.next_batch(7)
        count += len(rows)
        feed.batch_results([number_of(row) ** 2 for row in rows])
    return count


def odd_only(args: Any, ctx: Any) -> None:
    feed = ctx.data_feed()
    while not feed.should_stop():
        rows = feed.next_batch(7)
        feed.batch_results([[number_of(row)] if number_of(row) % 2 else [] for row in rows])


def number_of(row: Any) -> int:
    return int(row[0]) if isinstance(row, tuple) else int(row)


def too_few_results(args: Any, ctx: Any) -> None:
    feed = ctx.data_feed()
    while not feed.should_stop():
        feed.batch_results([1 for _ in feed.next_batch(7)][1:])


def no_results(args: Any, ctx: Any) -> None:
    ctx.data_feed().next_batch(7)


def stop_after_100(args: Any, ctx: Any) -> int:
    feed = ctx.data_feed()
    rows = 0
    while rows < 100:
        rows += len(feed.next_batch(50))
    feed.terminate()
    assert feed.should_stop()
    return rows


def fail(args: Any, ctx: Any) -> None:
    """The last node fails, as `args` says, after its first batch or at the end; the others read on."""
    feed = ctx.data_feed()
    if args != "late":
        feed.next_batch(10)
        if ctx.rank == ctx.size - 1:
            _fail(args)
    while not feed.should_stop():
        feed.next_batch(10)
    _fail(args)


def _fail(how: str) -> None:
    if how == "exit":
        sys.exit(3)
    if how == "hard exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise LookupError(f"I fail: {how}")


def in_step(args: Any, ctx: Any) -> int:
    """Batches that this node got; all nodes must get as many."""
    feed = ctx.data_feed(in_step=True)
    return sum(1 for _ in feed.remaining(8))


def learn_from_stream(args: Any, ctx: Any) -> list[int]:
    """Sums rows over micro-batches and keeps the sum in checkpoints; dies in the one that `args` names."""
    folder, fatal = args
    feed = ctx.data_feed()
    total, seen = 0, []
    checkpoint = feed.restore(folder)
    if checkpoint is not None:
        with open(os.path.join(checkpoint, "total")) as file:
            total = int(file.read())
    for number in feed.micro_batches():
        total += sum(row.x for batch in feed.batches(3) for row in batch)
        seen.append(number)
        with feed.checkpoint(folder) as place, open(os.path.join(place, "total"), "w") as file:
            file.write(str(total))
            if number == fatal:
                raise RuntimeError("the power is gone")
    return [total, *seen]


def wait_for_nothing(args: Any, ctx: Any) -> None:
    while not ctx.data_feed().should_stop():
        ctx.data_feed().next_batch(1)


def evaluate(args: Any, ctx: Any) -> Any:
    """Workers return at once; the evaluator finishes what it does, unless it is told to go on for ever."""
    if ctx.role != "evaluator":
        return ctx.training_ended
    while not ctx.wait_for_training(5) or args == "for ever":
        pass
    return "the last evaluation"


def environment(names: list[str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def talk(args: int, ctx: Any) -> None:
    """Prints many lines."""
    for number in range(args):
        sys.stdout.write(f"line {number} of {ctx.role}\n")


def fail_when_told(args: str, ctx: Any) -> None:
    """Takes no rows; fails, or returns, when the file `args` is there."""
    place = Path(args)
    (place / f"pid-{ctx.rank}").write_text(str(os.getpid()))
    while not (place / "go").exists():
        pass
    how = (place / "go").read_text()
    if how != "return":
        _fail(how)
