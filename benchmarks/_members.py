"""Many members of a run in one process: coroutines that speak to a hub as supervisors do, without workers."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from kindler.engine.meeting import Wants, decode_parts
from kindler.engine.wire import NONCE_BYTES, Address, introduction
from kindler.frame import Frame, Joiner, encode, reading

_TIMEOUT_S = 60.0
_BUFFER_BYTES = 1 << 20


class Member:
    """One connection to the hub."""

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.rank = rank
        self._reader, self._writer = reader, writer
        self._joiner = Joiner()
        self._turn = 0

    @classmethod
    async def join(cls, address: Address, secret: bytes, rank: int) -> Member:
        """Connect, prove to know the secret, and say who this is."""
        reader, writer = await asyncio.open_connection(*address, limit=_BUFFER_BYTES)
        reply, expected = introduction(secret, await reader.readexactly(NONCE_BYTES))
        writer.write(reply)
        assert hmac.compare_digest(await reader.readexactly(len(expected)), expected)
        member = cls(rank, reader, writer)
        await member.send("hello", rank=rank, host=f"host-{rank // 8}")
        return member

    async def send(self, kind: str, *buffers: bytes, **fields: Any) -> None:
        for frame in encode(kind, buffers, fields):
            for piece in frame:
                self._writer.write(bytes(piece))
        await self._writer.drain()

    async def receive(self) -> Frame:
        """The next message."""
        while True:
            parser = reading()
            wanted = next(parser)
            try:
                while True:
                    wanted = parser.send(await self._reader.readexactly(wanted))
            except StopIteration as done:
                message = self._joiner.take(done.value)
                if message is not None:
                    return message

    async def gather(self, data: bytes, wants: Wants = "all", *, read: bool = True) -> list[bytes]:
        """What the hub answers in this turn; not read where many members share a process."""
        turn, self._turn = self._turn, self._turn + 1
        await self.send("gather", data, turn=turn, wants=wants if isinstance(wants, str) else list(wants))
        frame = await self.receive()
        assert (frame.kind, frame.fields["turn"]) == ("gathered", turn)
        return decode_parts(frame) if read else []

    def close(self) -> None:
        self._writer.close()


async def join_all(address: Address, secret: bytes, size: int) -> list[Member]:
    """All members of a run of `size`, once they have been welcomed."""
    members = await asyncio.gather(*(Member.join(address, secret, rank) for rank in range(size)))
    await each(members, Member.receive)
    return list(members)


async def each(members: list[Member], do: Callable[[Member], Awaitable[Any]]) -> list[Any]:
    """What `do` returns for each member, all at the same time."""
    return await asyncio.wait_for(asyncio.gather(*map(do, members)), _TIMEOUT_S)
