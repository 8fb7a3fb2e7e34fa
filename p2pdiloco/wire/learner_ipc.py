"""Messages between a node and its learner over their Unix stream socket.

A frame is a 4-byte big-endian length and that many bytes of MessagePack: one tagged struct.

Rules of this file:
1. Only control goes over the socket; parameters lie in memory that both map (``training/shared_memory.py``): ``theta``
   (global parameters), ``shift`` (node to learner) and ``snapshot`` (learner to node), all in the flat layout.
2. The learner executes commands in order, at a step boundary. The node may not write a piece of ``shift`` again before
   ``Shifted`` names it, nor ask for a fragment's snapshot again before it has read the last one.
3. ``steps`` and ``tokens`` are counted from the start of the learner's life and never fall. ``step`` is the global
   step.
4. Both ends are one peer's own processes. Still nothing is unbounded: a frame has at most 1 MiB.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.ids import FragmentId, ShardId

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_FRAME_BYTES: Final = 1 << 20

_LENGTH: Final = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()


# --------------------------------------------------------------------------------------------------- node to learner


class Shift(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """For these shards: parameters += ``shift``, or parameters = ``shift`` if ``replace``."""

    shards: tuple[ShardId, ...]
    replace: bool


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All parameters have been given (``Shift``, ``replace``): train from global step ``step``. Also ends a pause."""

    step: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Copy the fragment's parameters into ``snapshot``."""

    fragment: FragmentId
    step: int


class Train(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Train this block of data after those given before. Answered by ``BlockFinished``."""

    block: Block


class AdoptStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Global step := max(own, ``step``)."""

    step: int
    tokens: int = 0
    """Merged by the swarm, of its budget."""


class Evaluate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Measure the held-out loss of ``theta``."""

    version: int


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop training, go on answering commands."""


class Rest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make no steps for now, go on answering commands (``Rested``); or go on with them."""

    is_resting: bool


class Save(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write the inner optimizer's state and the data's position to the learner's file, beside training."""


class Swarm(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """For a training script: who trains, and how all of them stand. Not answered."""

    me: str
    """This peer."""
    peers: tuple[str, ...]
    """Those that train, this one included, in order."""
    figures: dict[str, float]
    """By name (``node/swarm_status.py``)."""
    same_batches: str = ""
    """A peer that trains the same batches; empty: none is known."""


class Exit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the learner's process."""


# --------------------------------------------------------------------------------------------------- learner to node


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is built; waiting for the global parameters (``Shift``, ``replace``) and ``Begin``."""

    device: str
    parameters: int
    inner_steps: int = 0
    """Steps that the inner optimizer's restored state has made; 0 if it is fresh."""
    has_blocks: bool = False
    """The corpus is the run's own, so that blocks of it can be given."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One inner step is done. May be left out when the node does not read; then the next one's ``blocked_s`` and
    ``exchange_s`` include it."""

    steps: int
    tokens: int
    loss: float | None
    """Mean cross-entropy of the step's batch, in nats a token; None if a script does not tell it."""
    step_time_s: float
    """The step alone: forward, backward, optimizer."""
    blocked_s: float
    """Wall time since the last ``Progress`` in which socket calls put the training thread to sleep. Must be 0."""
    exchange_s: float
    """Wall time since the last ``Progress`` that copies to and from the shared vectors took."""


class BlockFinished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All samples of the block are trained; ``tokens`` is the count at the end of the step that did it."""

    block: Block
    tokens: int


class Shifted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``shift`` was applied for these shards and may be written again."""

    shards: tuple[ShardId, ...]


class Snapshotted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The fragment's parameters, after ``steps`` and ``tokens``, are in ``snapshot``. ``step`` is the command's."""

    fragment: FragmentId
    step: int
    steps: int
    tokens: int


class Evaluated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Mean held-out loss of ``theta`` in nats a token."""

    version: int
    loss: float


class Written(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A text of ``theta``, for people."""

    text: str


class Paused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Not training any more: asked to, or the run's last step is done."""

    steps: int
    tokens: int


class Rested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No steps are made until ``Rest`` says otherwise."""


class Batches(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Digests of the first batches that a script has trained."""

    digests: tuple[str, ...]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The learner ends; ``reason`` is a sentence for a person."""

    reason: str


class Trouble(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something failed that training survives; ``reason`` is a sentence for a person."""

    reason: str


class Unable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing that the learner trains can be merged; ``reason`` is a sentence for a person, empty: it can again."""

    reason: str


FromNode = Shift | Begin | Snapshot | Train | AdoptStep | Evaluate | Pause | Rest | Save | Swarm | Exit
FromLearner = (
    Ready
    | Progress
    | BlockFinished
    | Shifted
    | Snapshotted
    | Evaluated
    | Written
    | Paused
    | Rested
    | Batches
    | Trouble
    | Unable
    | Failed
)

ForPeople = Trouble | Written
"""Of a learner's messages those that no decision follows."""

MessageT = TypeVar("MessageT")


def welcome(manifest: bytes) -> bytes:
    """What a node says first to a training script that it has found: the run's manifest, as one frame.

    Raises:
        ValueError: it would have more than 1 MiB.
    """
    if len(manifest) > MAX_FRAME_BYTES:
        raise ValueError(f"the manifest has {len(manifest)} bytes, a frame at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(manifest)) + manifest


class Welcome:
    """A welcome as it comes in, piece by piece."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def manifest(self) -> bytes:
        """What has come of the manifest."""
        return bytes(self._data[_LENGTH.size :])

    def missing(self) -> int:
        """How many bytes may be read now, so that nothing beyond the welcome is; 0: it is whole.

        Raises:
            ValueError: the frame is too large.
        """
        if len(self._data) < _LENGTH.size:
            return _LENGTH.size - len(self._data)
        (size,) = _LENGTH.unpack_from(self._data)
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"a frame claims {size} bytes, at most {MAX_FRAME_BYTES} are allowed")
        return int(_LENGTH.size + size - len(self._data))

    def take(self, piece: bytes) -> None:
        """What came.

        Raises:
            ValueError: the stream ends in it.
        """
        if not piece:
            raise ValueError("the node left before it had said which run it is")
        self._data += piece


def encode(message: FromNode | FromLearner) -> bytes:
    """One frame.

    Raises:
        ValueError: it would have more than 1 MiB.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{type(message).__name__} has {len(body)} bytes, a frame at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Decoder(Generic[MessageT]):
    """Bytes in, messages out: ``Decoder[FromNode](FromNode)`` at the learner, and the like at the node."""

    def __init__(self, types: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(types)
        self._pending = bytearray()

    def feed(self, data: Buffer) -> list[MessageT]:
        """The messages that ``data`` completes, in order.

        Raises:
            ValueError: a frame is too large, or is no message of these types. The decoder is of no use after that.
        """
        self._pending += memoryview(data)
        messages: list[MessageT] = []
        at = 0
        with memoryview(self._pending) as view:
            while len(view) - at >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(view, at)
                if size > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame claims {size} bytes, at most {MAX_FRAME_BYTES} are allowed")
                end = at + _LENGTH.size + size
                if end > len(view):
                    break
                try:
                    messages.append(self._decoder.decode(view[at + _LENGTH.size : end]))
                except msgspec.MsgspecError as error:
                    raise ValueError(f"a frame is no message of the link: {error}") from error
                at = end
        del self._pending[:at]
        return messages
