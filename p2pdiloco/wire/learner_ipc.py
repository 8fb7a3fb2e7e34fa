"""Messages between a node and its learner over their Unix stream socket.

A frame is a 4-byte big-endian length and that many bytes of MessagePack: one tagged struct.

Rules of this file:
1. The socket carries control messages only. Parameters lie in memory that both processes map
   (``training/shared_memory.py``): ``theta`` (global parameters, in the flat layout), ``shift`` (node to learner) and
   ``snapshot`` (learner to node). The node chooses where a shard is in these two, and says so (``at``).
2. The learner executes commands in order, at a step boundary. The node must not write a piece of ``shift`` again before
   ``Shifted`` names it. It must not ask for a fragment's snapshot again before it has read the last one.
3. ``steps`` and ``tokens`` count from the learner's start and never decrease. ``step`` is the global step.
4. Both ends are processes of one peer. A frame is bounded nevertheless: it has at most 1 MiB.
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
    """Add ``shift`` to the parameters of these shards, or replace them by it if ``replace``."""

    shards: tuple[ShardId, ...]
    replace: bool
    at: tuple[int, ...] = ()
    """First element of each shard in ``shift``; empty: as in the flat layout."""


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Train from global step ``step``: all parameters were sent (``Shift`` with ``replace``). Also ends a pause."""

    step: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Copy the fragment's parameters into ``snapshot``."""

    fragment: FragmentId
    step: int
    at: tuple[int, ...] = ()
    """First element of each of its shards in ``snapshot``; empty: as in the flat layout."""


class Train(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Train this block of data after those sent before. Answered by ``BlockFinished``."""

    block: Block


class AdoptStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Raise the global step to at least ``step``."""

    step: int
    tokens: int = 0
    """Tokens of its budget that the swarm has merged; 0 without a budget."""


class Evaluate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Measure the held-out loss of ``theta``."""

    version: int


class MoveEnd(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The run ends at global step ``last_step``. A learner that has stopped trains again if it has not reached it."""

    last_step: int
    tokens: int = 0
    """Token budget of the run; 0 without one."""


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop training, but continue to answer commands."""


class Rest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Suspend training (``is_resting``; answered by ``Rested``) or resume it. Commands are answered in any case."""

    is_resting: bool


class Save(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write the inner optimizer's state and the data's position to the learner's file, while training continues."""


class Swarm(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Swarm status for a training script. Not answered."""

    me: str
    """Name of this peer."""
    peers: tuple[str, ...]
    """Peers that train, this one included, in order."""
    figures: dict[str, float]
    """Figures by name (``node/swarm_status.py``)."""
    same_batches: str = ""
    """A peer that trains the same batches; empty if none is known."""


class Exit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the learner's process."""


# --------------------------------------------------------------------------------------------------- learner to node


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is built. The learner waits for the global parameters (``Shift`` with ``replace``) and ``Begin``."""

    device: str
    parameters: int
    inner_steps: int = 0
    """Steps made with the inner optimizer's restored state; 0 if it is fresh."""
    has_blocks: bool = False
    """Whether the corpus is the run's own, so that its blocks can be assigned."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One inner step is done.

    The message may be skipped while the node does not read; the next one's ``overhead_s`` and ``blocked_s`` include it.
    """

    steps: int
    tokens: int
    loss: float | None
    """Mean cross-entropy of the step's batch, in nats a token; None if a script does not report it."""
    step_time_s: float
    """Duration of the step alone: batch, forward, backward, optimizer."""
    overhead_s: float
    """Wall time since the last ``Progress`` that the training thread spent between two steps: copies to and from the
    shared vectors, evaluations, saves, messages, waiting. Pauses and rests do not count."""
    blocked_s: float
    """The part of ``overhead_s`` in which socket calls blocked the training thread. Must be 0."""
    reward: float | None = None
    """Latest reward that a script has reported."""


class BlockFinished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All samples of the block are trained. ``tokens`` is the count after the step that finished it."""

    block: Block
    tokens: int


class Shifted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``shift`` was applied to these shards and may be written again."""

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
    """Sample text generated by ``theta``, for people."""

    text: str


class Paused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Training has stopped, on request or after the run's last step."""

    steps: int
    tokens: int
    step: int
    """Global step at which it stopped."""


class Rested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Training is suspended until the next ``Rest``."""


class Batches(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Digests of the first batches that a script has trained."""

    digests: tuple[str, ...]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The learner exits. ``reason`` is a sentence for a person."""

    reason: str


class Trouble(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A failure that training survives. ``reason`` is a sentence for a person."""

    reason: str


class Unable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The learner's progress cannot be merged. ``reason`` is a sentence for a person; empty: it can be again."""

    reason: str


FromNode = Shift | Begin | Snapshot | Train | AdoptStep | Evaluate | MoveEnd | Pause | Rest | Save | Swarm | Exit
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
"""Learner messages that are only shown to people."""

MessageT = TypeVar("MessageT")


def welcome(manifest: bytes) -> bytes:
    """Return the node's first frame to a training script: the run's manifest.

    Raises:
        ValueError: the manifest has more than 1 MiB.
    """
    if len(manifest) > MAX_FRAME_BYTES:
        raise ValueError(f"the manifest has {len(manifest)} bytes, a frame at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(manifest)) + manifest


class Welcome:
    """Incremental reader of a welcome frame."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def manifest(self) -> bytes:
        """The part of the manifest received so far."""
        return bytes(self._data[_LENGTH.size :])

    def missing(self) -> int:
        """Return how many bytes may be read without reading past the welcome; 0 if it is complete.

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
        """Add received bytes.

        Raises:
            ValueError: ``piece`` is empty: the stream ended within the welcome.
        """
        if not piece:
            raise ValueError("the node closed the connection before it had sent the run's manifest")
        self._data += piece


def encode(message: FromNode | FromLearner) -> bytes:
    """Encode ``message`` as one frame.

    Raises:
        ValueError: the frame has more than 1 MiB.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{type(message).__name__} has {len(body)} bytes, a frame at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Decoder(Generic[MessageT]):
    """Incremental decoder of frames: ``Decoder[FromNode](FromNode)`` at the learner, ``FromLearner`` at the node."""

    def __init__(self, types: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(types)
        self._pending = bytearray()

    def feed(self, data: Buffer) -> list[MessageT]:
        """Return the messages that ``data`` completes, in order.

        Raises:
            ValueError: a frame is too large or not a message of these types. The decoder must not be used after that.
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
                    raise ValueError(f"a frame is not a valid message: {error}") from error
                at = end
        del self._pending[:at]
        return messages
