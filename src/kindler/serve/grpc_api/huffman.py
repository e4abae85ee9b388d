"""The Huffman code of HPACK (RFC 7541, appendix B), read byte by byte.

The code is canonical, so that the lengths of its words say everything: words of one length are numbered in
the order of their symbols. A reader stands at a node of the tree; where a byte leads from there, and what it
says on the way, is found out once and remembered.
"""

from __future__ import annotations

__all__ = ["HuffmanError", "decoded"]

_END = 256
# fmt: off
_LENGTHS = (
    *(13, 23), *(28,) * 7, *(24, 30, 28, 28, 30), *(28,) * 8, 30, *(28,) * 9,
    *(6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6),
    *(5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10),
    *(13, 6), *(7,) * 22, *(8, 7, 8, 13, 19, 13, 14, 6),
    *(15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28),
    *(20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23),
    *(24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24),
    *(22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23),
    *(21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23),
    *(26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25),
    *(19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27),
    *(20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23),
    *(26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26),
    30,
)
# fmt: on


class HuffmanError(ValueError):
    """Bits that are no text."""


def _tree() -> list[list[int]]:
    """For each node, where 0 and 1 lead: to another node, or to a symbol, which is written as -1 - symbol."""
    nodes = [[0, 0]]
    word, before = 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(_LENGTHS)):
        word <<= length - before
        before = length
        node = 0
        for bit in range(length - 1, 0, -1):
            turn = word >> bit & 1
            if not nodes[node][turn]:
                nodes.append([0, 0])
                nodes[node][turn] = len(nodes) - 1
            node = nodes[node][turn]
        nodes[node][word & 1] = -1 - symbol
        word += 1
    return nodes


_NODES = _tree()
_STEPS: dict[int, tuple[int, bytes]] = {}  # by node and byte


def _paddings() -> frozenset[int]:
    """Where a text may end: after a whole word, or up to 7 bits into the word of ones that ends all."""
    nodes, node = [0], 0
    for _ in range(7):
        node = _NODES[node][1]
        nodes.append(node)
    return frozenset(nodes)


_PADDINGS = _paddings()


def decoded(data: bytes) -> bytes:
    """The text.

    Raises:
        HuffmanError: It is none.
    """
    node, said = 0, []
    for byte in data:
        step = _STEPS.get(node << 8 | byte)
        if step is None:
            step = _STEPS[node << 8 | byte] = _step(node, byte)
        node, some = step
        said.append(some)
    if node not in _PADDINGS:
        raise HuffmanError("a text that ends in the middle of a word")
    return b"".join(said)


def _step(node: int, byte: int) -> tuple[int, bytes]:
    said = bytearray()
    for bit in range(7, -1, -1):
        node = _NODES[node][byte >> bit & 1]
        if node < 0:
            symbol = -1 - node
            if symbol == _END:
                raise HuffmanError("a text that goes on after its end")
            said.append(symbol)
            node = 0
    return node, bytes(said)
