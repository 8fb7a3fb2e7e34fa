"""The outer step in one pass over memory, with an int4 body decoded on the way; see ``outer`` for what it computes and
``kernels`` for the rules.

Momentum is float32, or bfloat16 as the int16 that have its bits (``narrow``); of two arguments for it one is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from p2pdiloco.tensors.kernels import RUN, compiled, to_bfloat16, unpacked

if TYPE_CHECKING:
    from numpy.typing import NDArray


@compiled("void(float32[::1], float32[::1], float32[::1], float32, float32)")
def outer_step(
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32],
    gradient: NDArray[np.float32],
    learning_rate: float,
    momentum_factor: float,
) -> None:
    """See ``outer``: ``gradient`` becomes new - old ``theta``."""
    for i in range(theta.size):
        m = momentum[i] * momentum_factor + gradient[i]
        momentum[i] = m
        t = theta[i]
        new = t - (m * momentum_factor + gradient[i]) * learning_rate
        theta[i] = new
        gradient[i] = new - t


@compiled("void(int16[::1], int32[::1])")
def _widen(narrow: NDArray[np.int16], bits: NDArray[np.int32]) -> None:
    for i in range(bits.size):
        bits[i] = np.int32(np.int32(narrow[i]) << np.int32(16))


@compiled("void(float32[::1], float32[::1], float32)")
def _advance(momentum: NDArray[np.float32], gradient: NDArray[np.float32], momentum_factor: float) -> None:
    for i in range(momentum.size):
        momentum[i] = momentum[i] * momentum_factor + gradient[i]


@compiled("void(int32[::1], int32[::1], int16[::1])")
def _round(bits: NDArray[np.int32], rounded: NDArray[np.int32], narrow: NDArray[np.int16]) -> None:
    for i in range(narrow.size):
        r = to_bfloat16(bits[i])
        rounded[i] = r
        narrow[i] = np.int16(np.int32(r >> np.int32(16)))


@compiled("void(float32[::1], float32[::1], float32[::1], float32[::1], float32, float32, float32)")
def _move(
    theta: NDArray[np.float32],
    exact: NDArray[np.float32],
    rounded: NDArray[np.float32],
    gradient: NDArray[np.float32],
    learning_rate: float,
    momentum_factor: float,
    carry: float,
) -> None:
    for i in range(theta.size):
        step = (exact[i] * momentum_factor + gradient[i]) + (exact[i] - rounded[i]) * carry
        t = theta[i]
        new = t - step * learning_rate
        theta[i] = new
        gradient[i] = new - t


@compiled("void(float32[::1], int16[::1], float32[::1], float32, float32, float32)")
def outer_step_narrow(
    theta: NDArray[np.float32],
    narrow: NDArray[np.int16],
    gradient: NDArray[np.float32],
    learning_rate: float,
    momentum_factor: float,
    carry: float,
) -> None:
    """See ``outer``: ``gradient`` becomes new - old ``theta``."""
    run = min(RUN, theta.size)
    exact_bits, rounded_bits = np.empty(run, np.int32), np.empty(run, np.int32)
    exact, rounded = exact_bits.view(np.float32), rounded_bits.view(np.float32)
    for at in range(0, theta.size, RUN):
        t, n, g = theta[at : at + RUN], narrow[at : at + RUN], gradient[at : at + RUN]
        _widen(n, exact_bits[: t.size])
        _advance(exact[: t.size], g, momentum_factor)
        _round(exact_bits[: t.size], rounded_bits[: t.size], n)
        _move(t, exact[: t.size], rounded[: t.size], g, learning_rate, momentum_factor, carry)


@compiled("void(float32[::1], float32[::1], float32[::1], float32[::1], float32[::1], float32, float32)")
def _step_aside(
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32],
    gradient: NDArray[np.float32],
    new_theta: NDArray[np.float32],
    new_momentum: NDArray[np.float32],
    learning_rate: float,
    momentum_factor: float,
) -> None:
    for i in range(theta.size):
        m = momentum[i] * momentum_factor + gradient[i]
        new_momentum[i] = m
        new_theta[i] = theta[i] - (m * momentum_factor + gradient[i]) * learning_rate


@compiled("void(float32[::1], int16[::1], float32[::1], int16[::1])")
def _copy(
    theta: NDArray[np.float32],
    narrow: NDArray[np.int16],
    new_theta: NDArray[np.float32],
    new_narrow: NDArray[np.int16],
) -> None:
    for i in range(theta.size):
        new_theta[i] = theta[i]
    for i in range(narrow.size):
        new_narrow[i] = narrow[i]


@compiled(
    "void(symbols_, float32[::1], int64, float32[::1], float32[::1], int16[::1], float32[::1], float32[::1],"
    " int16[::1], float32, float32, float32)"
)
def step_aside_int4(
    packed: NDArray[np.int8],
    scales: NDArray[np.float32],
    block: int,
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32],
    narrow: NDArray[np.int16],
    new_theta: NDArray[np.float32],
    new_momentum: NDArray[np.float32],
    new_narrow: NDArray[np.int16],
    learning_rate: float,
    momentum_factor: float,
    carry: float,
) -> None:
    """What an outer step with the decoded gradient gives, beside the old values."""
    half = block // 2
    run = max(RUN, half)
    room = np.empty(run, np.float32)
    for side in range(2):
        for at in range(0, packed.size, run):
            begin = side * packed.size + at
            end = begin + packed[at : at + run].size
            old, new = theta[begin:end], new_theta[begin:end]
            gradient = room[: old.size]
            unpacked(packed[at : at + run], side == 1, scales, begin // half, half, gradient)
            if narrow.size:
                _copy(old, narrow[begin:end], new, new_narrow[begin:end])
                outer_step_narrow(new, new_narrow[begin:end], gradient, learning_rate, momentum_factor, carry)
            else:
                m, new_m = momentum[begin:end], new_momentum[begin:end]
                _step_aside(old, m, gradient, new, new_m, learning_rate, momentum_factor)


@compiled("void(float32[::1], float32[::1], boolean)")
def _pass_on(x: NDArray[np.float32], to: NDArray[np.float32], is_added: bool) -> None:
    if is_added:
        for i in range(to.size):
            to[i] += x[i]
    else:
        for i in range(to.size):
            to[i] = x[i]


@compiled(
    "void(symbols_, float32[::1], symbols_, float32[::1], int64, float32[::1], float32[::1], int16[::1], float32[::1],"
    " boolean, float32, float32, float32)"
)
def step_int4(
    packed: NDArray[np.int8],
    scales: NDArray[np.float32],
    own_packed: NDArray[np.int8],
    own_scales: NDArray[np.float32],
    block: int,
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32],
    narrow: NDArray[np.int16],
    buffer: NDArray[np.float32],
    is_added: bool,
    learning_rate: float,
    momentum_factor: float,
    carry: float,
) -> None:
    """The outer step with the decoded gradient, in place; what the parameters moved by, and an own decoded contribution
    (if there is one), goes to ``buffer`` (if there is one), or is added to what that holds."""
    half = block // 2
    run = max(RUN, half)
    room, own_room = np.empty(run, np.float32), np.empty(run, np.float32)
    for side in range(2):
        for at in range(0, packed.size, run):
            begin = side * packed.size + at
            end = begin + packed[at : at + run].size
            old = theta[begin:end]
            change = room[: old.size]
            unpacked(packed[at : at + run], side == 1, scales, begin // half, half, change)
            if narrow.size:
                outer_step_narrow(old, narrow[begin:end], change, learning_rate, momentum_factor, carry)
            else:
                outer_step(old, momentum[begin:end], change, learning_rate, momentum_factor)
            if own_scales.size:
                own = own_room[: old.size]
                unpacked(own_packed[at : at + run], side == 1, own_scales, begin // half, half, own)
                _pass_on(own, change, True)
            if buffer.size:
                _pass_on(change, buffer[begin:end], is_added)
