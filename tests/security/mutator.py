"""Bytes that are nearly valid: most bugs of a decoder show on input close to what it expects."""

from __future__ import annotations

import random

# MessagePack lengths and types that announce more than follows, and the first bytes of other formats.
_TEETH = (
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01", b"\xd4\x7f\x00", b"\xc7\x00\x05", b"\xc1", b"\x80\x05.", b"\x1f\x8b\x08",
    b"\x91" * 200, b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7,
    b"\xed\xa0\x80", b"\x00", b"{}", b"null",
)  # fmt: skip


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The data with a defect: a few bytes changed, cut, doubled, or all replaced."""
    changed = bytearray(data)
    match draw.randrange(7):
        case 0:
            return draw.randbytes(draw.randrange(80))
        case 1:
            return bytes(changed[: draw.randrange(len(changed) + 1)])
        case 2:
            place = draw.randrange(len(changed) + 1)
            changed[place:place] = draw.choice(_TEETH)
        case 3:
            start = draw.randrange(len(changed) + 1)
            changed[start:start] = changed[start : start + draw.randrange(40)]
        case 4:
            start = draw.randrange(len(changed) + 1)
            del changed[start : start + draw.randrange(1, 9)]
        case _:
            for _ in range(draw.randint(1, 4) if changed else 0):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)
