"""Symbols of a few bits to bytes and back: pure layout, whole vectors at a time.

Rules of this file:
1. A byte holds one element of each half (4 bits) or quarter (2 bits) of the vector, never neighbours: so all work is on
   whole vectors, which is six times faster.
2. Symbols are int8 in two's complement. Unpacking extends the sign, so any bytes give symbols in range: a hostile body
   needs no check here.
3. Nothing is allocated; every function writes into the caller's vectors. Those it names scratch lose their content.

E3M0 (a sign and three bits of exponent, as Streaming DiLoCo sends, arXiv 2501.18512) becomes an int8 symbol too: code 0
is 0, code e is 2^(e-1), so 1, 2, 4 ... 64. Its value is then symbol * scale, like any other's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(symbols: Tensor, bits: int, packed: Tensor) -> None:
    """``symbols`` int8[m] of ``bits`` each to ``packed`` int8[m * bits / 8]; ``symbols`` become scratch."""
    match bits:
        case 8:
            packed.copy_(symbols)
        case 4:
            low, high = symbols.view(2, -1)
            torch.bitwise_left_shift(high, 4, out=packed)
            packed.bitwise_or_(low.bitwise_and_(15))
        case 2:
            first, second, third, fourth = symbols.view(4, -1)
            torch.bitwise_left_shift(fourth, 6, out=packed)
            packed.bitwise_or_(third.bitwise_and_(3).bitwise_left_shift_(4))
            packed.bitwise_or_(second.bitwise_and_(3).bitwise_left_shift_(2))
            packed.bitwise_or_(first.bitwise_and_(3))


def unpack(packed: Tensor, bits: int, symbols: Tensor) -> None:
    """The reverse of ``pack``."""
    match bits:
        case 8:
            symbols.copy_(packed)
        case 4:
            low, high = symbols.view(2, -1)
            torch.bitwise_left_shift(packed, 4, out=low)
            low.bitwise_right_shift_(4)  # of signed integers: the sign comes along
            torch.bitwise_right_shift(packed, 4, out=high)
        case 2:
            for place, quarter in enumerate(symbols.view(4, -1)):
                torch.bitwise_left_shift(packed, 6 - 2 * place, out=quarter)
                quarter.bitwise_right_shift_(6)


def split_bytes(halves: Tensor, planes: Tensor) -> None:
    """``halves`` int16[m] to ``planes`` uint8[2, m]: the high bytes, then the low ones. ``halves`` become scratch."""
    high, low = planes.view(torch.int8)
    low.copy_(halves)  # keeps the low byte
    high.copy_(halves.bitwise_right_shift_(8))


def join_bytes(planes: Tensor, halves: Tensor, room: Tensor) -> None:
    """The reverse of ``split_bytes``; ``room`` float32[at least m / 2] is scratch."""
    high, low = planes
    wide = room.view(torch.int16)[: halves.numel()]
    halves.copy_(high).bitwise_left_shift_(8)
    halves.bitwise_or_(wide.copy_(low))


def to_exponents(scaled: Tensor, narrow: Tensor, codes: Tensor) -> None:
    """``scaled`` float32[m] in about [-64, 64] to E3M0 ``codes`` int8[m] in 0..15 (8 is the sign), each rounded to the
    nearest power of two, and to zero below 3/4. ``scaled`` and ``narrow`` bfloat16[m] become scratch."""
    halves = narrow.copy_(scaled).view(torch.int16)
    exponents = scaled.view(torch.int16)[: halves.numel()]
    torch.bitwise_and(halves, 0x7FFF, out=exponents)
    # Half a mantissa carries into the exponent from 1.5 up; 127 is bfloat16's exponent of 1.0, which is code 1.
    exponents.add_(0x40 - (126 << 7)).bitwise_right_shift_(7).clamp_(0, 7)
    codes.copy_(exponents.bitwise_or_(halves.bitwise_right_shift_(12).bitwise_and_(8)))


def from_exponents(codes: Tensor, narrow: Tensor) -> None:
    """E3M0 ``codes`` int8[m], sign-extended from 4 bits, to symbols 0, +-1, +-2 ... +-64 in place. ``narrow``
    uint8[2 m] is scratch."""
    exponents, powers = narrow.view(2, -1)
    torch.bitwise_and(codes.view(torch.uint8), 7, out=exponents)
    powers.fill_(1).bitwise_left_shift_(exponents).bitwise_right_shift_(1)
    codes.bitwise_right_shift_(7)  # 0 or -1: two's complement turns a magnitude m into (m ^ -1) - -1
    codes.copy_(powers.view(torch.int8).bitwise_xor_(codes).sub_(codes))
