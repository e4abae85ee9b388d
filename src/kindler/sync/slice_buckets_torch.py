"""Buckets of which each rank gets the sum of its own slice, and that bring slices to all ranks.

A round of gradients (see `Bucket`) is followed by a round of parameters in the same memory: `publish`, after
a rank has moved its slice, and `collect`. On one host each rank reads the others' slots. Between hosts the
first rank of each takes part in a reduce-scatter and an all-gather for its host. Slices that are not
contiguous go along any other bucket as two sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from kindler.sync.buckets_torch import Bucket, HostBucket
from kindler.sync.network_torch import Network, Work
from kindler.sync.shared_memory import Channel
from kindler.sync.topology import Topology


class Stretch(Protocol):
    """A part of a parameter that travels: its values, and where they lie in the bucket."""

    flat: torch.Tensor
    span: slice


class SliceBucket(Bucket, Protocol):
    """A bucket that knows who owns what of it."""

    def divide(self, by_rank: Sequence[Sequence[Stretch]], values: int) -> None:
        """Say what each rank owns of the first `values` elements; all ranks get the sum of the rest.

        Until it is called, all ranks get all sums.
        """

    def publish(self) -> None:
        """After `wait`: hand out this rank's stretches as they are now."""

    def collect(self) -> None:
        """Take over those of the others."""


class OneHostSlices(HostBucket):
    """In shared memory: a rank's stretches lie in its own slot."""

    _own: Sequence[Stretch] = ()
    _others: Sequence[tuple[Stretch, torch.Tensor]] = ()
    _summed: Sequence[slice] | None = None
    _meeting: Channel | None = None

    def share(self, meeting: Channel) -> None:
        """From now on all ranks have the same memory for their parameters: only meet, through this."""
        self._meeting = meeting

    def divide(self, by_rank: Sequence[Sequence[Stretch]], values: int) -> None:
        """Note who owns what."""
        rank = self._channel.place
        slots = self._channel.slots(self.fill.dtype)
        self._own = by_rank[rank]
        self._others = [
            (stretch, slots[other][stretch.span])
            for other, stretches in enumerate(by_rank)
            if other != rank
            for stretch in stretches
        ]
        self._summed = [*joined(stretch.span for stretch in self._own), slice(values, len(self.fill))]

    def wait(self) -> None:
        """Block until the sums of this rank's own slice, and of the rest, are in `result`."""
        if self._summed is None:
            super().wait()
        else:
            self._channel.sum_parts(self.result, self._summed)

    def publish(self) -> None:
        """Write them to this rank's slot."""
        if self._meeting is not None:
            self._meeting.post()
            return
        self.begin()
        copy_all((self.fill[stretch.span], stretch.flat) for stretch in self._own)
        self._channel.post()

    def collect(self) -> None:
        """Read the other slots."""
        if self._meeting is not None:
            self._meeting.await_all()
            return
        self._channel.await_all()
        copy_all((stretch.flat, place) for stretch, place in self._others)
        self._channel.skip()


class SummedSlices:
    """Along any bucket: all ranks get all sums, and parameters are sums of zeros and one rank's values."""

    def __init__(self, inner: Bucket, rank: int) -> None:
        self.fill, self.result = inner.fill, inner.result
        self.begin, self.launch, self.push, self.wait = inner.begin, inner.launch, inner.push, inner.wait
        self._rank = rank
        self._own: Sequence[Stretch] = ()
        self._others: Sequence[Stretch] = ()

    def divide(self, by_rank: Sequence[Sequence[Stretch]], values: int) -> None:
        """Note who owns what."""
        self._own = by_rank[self._rank]
        self._others = [s for rank, part in enumerate(by_rank) if rank != self._rank for s in part]

    def publish(self) -> None:
        """Start the sum."""
        self.begin()
        self.fill.zero_()
        copy_all((self.fill[stretch.span], stretch.flat) for stretch in self._own)
        self.launch()

    def collect(self) -> None:
        """Wait for it."""
        self.push(block=True)
        self.wait()
        copy_all((stretch.flat, self.result[stretch.span]) for stretch in self._others)


class RingSlices:
    """Between hosts: the slices of a host's ranks lie side by side, in the order of the hosts."""

    def __init__(
        self,
        elements: int,
        dtype: torch.dtype,
        channel: Channel | None,
        network: Network | None,
        where: Topology,
    ) -> None:
        self.result = torch.zeros(elements, dtype=dtype)
        self.fill = self.result if channel is None else channel.peek(dtype)[:elements]
        self._channel, self._network, self._where = channel, network, where
        self._works: list[Work] | None = None
        self._values = 0
        self._bounds: Sequence[int] = ()
        self._by_rank: Sequence[Sequence[Stretch]] = ()

    def divide(self, by_rank: Sequence[Sequence[Stretch]], values: int) -> None:
        """Note who owns what."""
        sizes = [sum(s.span.stop - s.span.start for s in stretches) for stretches in by_rank]
        of_hosts = [0] * len(self._where.leaders)
        for rank, size in enumerate(sizes):
            of_hosts[self._where.leader_of[rank]] += size
        self._bounds = [sum(of_hosts[:place]) for place in range(len(of_hosts) + 1)]
        self._by_rank, self._values = by_rank, values

    def begin(self) -> None:
        """Wait until the other ranks of this host have read this rank's last values."""
        if self._channel is not None:
            self._channel.slot(self.fill.dtype)

    def launch(self) -> None:
        """Tell the other ranks of this host, or start at once where there are none."""
        if self._channel is not None:
            self._channel.post()
        else:
            self._start()

    def push(self, *, block: bool) -> bool:
        """On the first rank of a host: hand the host's sum to the network."""
        if self._network is None or self._works is not None or self._channel is None:
            return True
        if not (block or self._channel.arrived()):
            return False
        self._channel.gather_into(self.result)
        self._start()
        return True

    def wait(self) -> None:
        """Block until the sums of this rank's own slice, and of the rest, are in `result`."""
        rest = slice(self._values, len(self.result))
        if self._network is None:
            assert self._channel is not None, "a rank that does not lead shares memory with one that does"
            self._channel.fetch_parts(self.result, [*self._own_spans(), rest])
            return
        self.push(block=True)
        self._finish()
        if self._channel is not None:
            self._channel.publish_parts(self.result, [self._of_host(), rest])

    def publish(self) -> None:
        """Write them to this rank's slot."""
        self.begin()
        own = self._by_rank[self._where.rank]
        copy_all((self.fill[stretch.span], stretch.flat) for stretch in own)
        if self._channel is not None:
            self._channel.post()

    def collect(self) -> None:
        """Bring those of this host together, and exchange them with the other hosts'."""
        values = self.result[: self._values]
        if self._network is None:
            assert self._channel is not None, "a rank that does not lead shares memory with one that does"
            self._channel.fetch(values)
        else:
            if self._channel is not None:
                self._channel.await_all()
                slots = self._channel.slots(self.result.dtype)
                for rank, slot in zip(self._where.ranks, slots, strict=True):
                    copy_all((values[s.span], slot[s.span]) for s in self._by_rank[rank])
            self._works = [self._network.all_gather(values, self._bounds)]
            self._finish()
            if self._channel is not None:
                self._channel.publish(values)
        copy_all(
            (stretch.flat, values[stretch.span])
            for rank, stretches in enumerate(self._by_rank)
            if rank != self._where.rank
            for stretch in stretches
        )

    def _start(self) -> None:
        assert self._network is not None, "of a host, only who leads starts"
        self._works = [self._network.all_reduce(self.result[self._values :])]
        if self._values:
            self._works.append(self._network.reduce_scatter(self.result[: self._values], self._bounds))

    def _finish(self) -> None:
        works, self._works = self._works or [], None
        for work in works:
            work.wait()

    def _own_spans(self) -> list[slice]:
        return joined(stretch.span for stretch in self._by_rank[self._where.rank]) if self._by_rank else []

    def _of_host(self) -> slice:
        if not self._by_rank:
            return slice(0, 0)
        place = self._where.leader_of[self._where.rank]
        return slice(self._bounds[place], self._bounds[place + 1])


def joined(spans: Iterable[slice]) -> list[slice]:
    """Spans in their order, those that touch as one.

    >>> joined([slice(0, 2), slice(2, 5), slice(7, 9)])
    [slice(0, 5, None), slice(7, 9, None)]
    """
    found: list[slice] = []
    for span in spans:
        if found and found[-1].stop == span.start:
            found[-1] = slice(found[-1].start, span.stop)
        else:
            found.append(span)
    return found


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Overwrite the first of each pair with the second."""
    targets, sources = [], []
    for target, source in pairs:
        targets.append(target)
        sources.append(source)
    if targets:
        torch._foreach_copy_(targets, sources)
