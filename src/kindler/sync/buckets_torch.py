"""Flat buffers that are filled, summed over ranks and read, step after step, along one of three routes.

Who fills them and what their elements mean is `gradients_torch.py`'s; which route is taken is
`allreduce_torch.py`'s.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kindler.sync.network_torch import Network, Work
from kindler.sync.shared_memory import Channel

_DOING = "all-reduce of gradients"


class Bucket(Protocol):
    """One flat buffer. A round is `begin`, filling `fill`, `launch`, `wait`; then `result` holds the sum."""

    fill: torch.Tensor
    result: torch.Tensor

    def begin(self) -> None:
        """Wait until `fill` may be written."""

    def launch(self) -> None:
        """Say that `fill` is complete."""

    def push(self, *, block: bool) -> bool:
        """Hand it on to the network if the whole host has arrived, or once it has; whether that is done."""

    def wait(self) -> None:
        """Block until `result` holds the sum."""


class NetworkBucket:
    """Summed in place by the network (or by nobody, where there is one rank)."""

    def __init__(
        self, elements: int, dtype: torch.dtype, device: torch.device, network: Network | None
    ) -> None:
        self.fill = self.result = torch.zeros(elements, dtype=dtype, device=device)
        self._network = network
        self._work: Work | None = None

    def begin(self) -> None:
        """The buffer is private: nothing to wait for."""

    def launch(self) -> None:
        """Start the sum."""
        if self._network is not None:
            self._work = self._network.all_reduce(self.fill, doing=_DOING)

    def push(self, *, block: bool) -> bool:
        """The network has had it since `launch`."""
        return True

    def wait(self) -> None:
        """Block until the network is done."""
        if self._work is not None:
            self._work.wait()
            self._work = None


class HostBucket:
    """Filled straight in shared memory; of several hosts, the leaders take their sums to the network."""

    def __init__(
        self,
        elements: int,
        dtype: torch.dtype,
        channel: Channel,
        network: Network | None,
        *,
        leads: bool,
        alone: bool,
    ) -> None:
        self.fill = channel.peek(dtype)[:elements]
        self.result = torch.zeros(elements, dtype=dtype)
        self._channel = channel
        self._network = network
        self._leads, self._alone = leads, alone
        self._work: Work | None = None

    def begin(self) -> None:
        """Wait until the other ranks have read this rank's last values."""
        self._channel.slot(self.fill.dtype)

    def launch(self) -> None:
        """Tell the other ranks of this host."""
        self._channel.post()

    def push(self, *, block: bool) -> bool:
        """On a leader of one of several hosts: hand the host's sum to the network."""
        if self._network is None or self._work is not None:
            return True
        if not (block or self._channel.arrived()):
            return False
        self._channel.gather_into(self.result)
        self._work = self._network.all_reduce(self.result, doing=_DOING)
        return True

    def wait(self) -> None:
        """Block until the sum over all ranks is there."""
        if self._alone:
            self._channel.sum_into(self.result)
        elif self._network is None:
            self._channel.fetch(self.result)
        else:
            self.push(block=True)
            assert self._work is not None, "push has started it"
            self._work.wait()
            self._work = None
            self._channel.publish(self.result)


class StagedBucket:
    """A CUDA buffer that travels over a CPU bucket."""

    def __init__(self, inner: Bucket, device: torch.device) -> None:
        self.fill = self.result = torch.zeros_like(inner.fill, device=device)
        self._inner = inner

    def begin(self) -> None:
        """The CUDA buffer is private: nothing to wait for."""

    def launch(self) -> None:
        """Bring the values to the CPU and start there."""
        self._inner.begin()
        self._inner.fill.copy_(self.fill)
        self._inner.launch()

    def push(self, *, block: bool) -> bool:
        """Let the CPU bucket go on."""
        return self._inner.push(block=block)

    def wait(self) -> None:
        """Bring the sum back."""
        self._inner.wait()
        self.result.copy_(self._inner.result)
