"""Multi-rank learners: all ranks of one peer (``torchrun --nproc-per-node N``) execute the node's commands together.

Rules of this file:
1. Rank 0 of the group, the *leader*, talks to the node. The other ranks learn everything from the leader. All ranks
   thus execute the same commands at the same step, whatever happens to the node; even the node's end is announced by
   the leader.
2. Control messages use a separate gloo group, which no GPU waits for. Parameters of CUDA models use the group's own
   backend.
3. A sharded model (FSDP2, ``fully_shard``) is gathered one tensor at a time, never as a whole. Only the leader has the
   flat vectors.
4. If a rank dies, the next collective of the others fails. Nothing here catches that: torchrun restarts all ranks. To
   the node this is the death of its learner, and it waits for the restarted one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.protocol.manifest import Layout, TensorSpec
from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.node_link import NewNode, NodeSearch
from p2pdiloco.training.parameters import check_tensors, moves
from p2pdiloco.training.shared_memory import NoVectors, Vectors
from p2pdiloco.wire import learner_ipc

_LOOK_S = 0.05


class RankGroup:
    """The ranks of ``group``. All ranks must call each method together; properties are local."""

    def __init__(self, group: dist.ProcessGroup | None, patience_s: float) -> None:
        """``patience_s``: timeout of the ranks' control messages."""
        ranks = dist.get_process_group_ranks(group)
        self._leader = ranks[0]
        self._own = group
        self._control = dist.new_group(
            ranks, timeout=timedelta(seconds=patience_s), backend="gloo", use_local_synchronization=True
        )
        self.is_leader = dist.get_rank() == self._leader

    def gather(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return the full parameters, float32, at the leader; an empty list at the others."""
        copies = []
        for name, parameter in named:
            full = _whole(parameter)
            if self.is_leader:
                copies.append((name, full.to("cpu", torch.float32, copy=True).contiguous()))
        return copies

    def sum(self, *values: float) -> list[float]:
        """Return the sums over the ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._control)
        return cast(list[float], total.tolist())

    def totals(self, is_step: bool, tokens: int, loss: float | None) -> tuple[int, int, float, int]:
        """Return sums over the ranks: ranks that made the step, tokens, losses, and ranks that reported a loss."""
        sums = self.sum(is_step, tokens, 0.0 if loss is None else loss, loss is not None)
        return int(sums[0]), int(sums[1]), sums[2], int(sums[3])

    def lead(self, attempt: Callable[[], bytes], failure: type[Exception]) -> bytes:
        """Call ``attempt`` at the leader only, and return its result on all ranks.

        Raises:
            failure: it failed there. The message is the same on all ranks.
        """
        data, has_failed = b"", False
        if self.is_leader:
            try:
                data = attempt()
            except Exception as error:  # noqa: BLE001 - the others must not wait for a leader that failed
                data, has_failed = (str(error) or type(error).__name__).encode(errors="replace"), True
        data, has_failed = self.tell(data, has_failed)
        if has_failed:
            raise failure(data.decode())
        return data

    def tell(self, data: bytes, flag: bool) -> tuple[bytes, bool]:
        """Return the leader's ``data`` and ``flag`` on all ranks."""
        head = torch.tensor([len(data), flag])
        self.share(head)
        size, told = head.tolist()
        if not size:
            return b"", bool(told)
        body = torch.frombuffer(bytearray(data if self.is_leader else bytes(size)), dtype=torch.uint8)
        self.share(body)
        return body.numpy().tobytes(), bool(told)

    def share(self, tensor: Tensor) -> None:
        """Set ``tensor`` to the leader's value on all ranks, in place."""
        group = self._own if tensor.is_cuda else self._control
        dist.broadcast(tensor, src=self._leader, group=group)


class RankGroupChannel:
    """The counterpart of ``Channel`` for a rank group: all ranks get the same commands at the same step, and the leader
    answers."""

    def __init__(self, island: RankGroup, channel: Channel | None) -> None:
        """``channel``: the leader's; None at the other ranks."""
        self._ranks = island
        self._channel = channel
        self._decoder = learner_ipc.Decoder[learner_ipc.FromNode](learner_ipc.FromNode)
        self.is_closed = False
        self.blocked_s = 0.0

    def post(self, message: learner_ipc.FromLearner) -> bool:
        """Queue ``message``, as ``Channel.post``. Only the leader sends."""
        return self._channel is None or self._channel.post(message)

    def exchange(self) -> list[learner_ipc.FromNode]:
        """Return the commands that the leader received, as ``Channel.exchange``. A protocol violation counts as the
        node's end."""
        frames = b""
        if self._channel is not None:
            try:
                frames = b"".join(map(learner_ipc.encode, self._channel.exchange()))
                self.blocked_s += self._channel.blocked_s
                self._channel.blocked_s = 0.0
                self.is_closed = self._channel.is_closed
            except ValueError:
                self.is_closed = True
        frames, self.is_closed = self._ranks.tell(frames, self.is_closed)
        return self._decoder.feed(frames) if frames else []

    def wait(self, most_s: float) -> None:
        """Sleep for a moment: only the leader has the socket."""
        time.sleep(min(most_s, _LOOK_S))

    def flush(self, timeout_s: float) -> bool:
        """Send what is queued, as ``Channel.flush``. Returns True at ranks that send nothing."""
        return self._channel is None or self._channel.flush(timeout_s)


class RankGroupNodeSearch:
    """The counterpart of ``NodeSearch`` for a rank group: the leader waits for the next node and tells the others at
    each step."""

    def __init__(self, island: RankGroup, search: NodeSearch | None) -> None:
        """``search``: the leader's; None at the other ranks."""
        self._ranks = island
        self._search = search
        self.is_open = False
        self.is_over = False

    def open(self) -> bool:
        """Begin to wait for a node, on all ranks. Returns False if that is not possible."""
        _, self.is_open = self._ranks.tell(b"", self._search is not None and self._search.open())
        self.is_over = False
        return self.is_open

    def poll(self) -> RankGroupNewNode | None:
        """Return the node that has come to the leader, if any."""
        new_node = None if self._search is None else self._search.poll()
        is_over = self._search is not None and self._search.is_over
        over, has_come = self._ranks.tell(b"over" if is_over else b"", new_node is not None)
        self.is_over = bool(over)
        if not has_come:
            return None
        self.is_open = False
        return RankGroupNewNode(self._ranks, new_node)

    def close(self) -> None:
        """Stop waiting."""
        self.is_open = False
        if self._search is not None:
            self._search.close()


class RankGroupNewNode:
    """A new node that has come to the leader."""

    def __init__(self, island: RankGroup, new_node: NewNode | None) -> None:
        """``new_node``: the leader's; None at the other ranks."""
        self._ranks = island
        self._new_node = new_node

    def attach(self, layout: Layout) -> tuple[Vectors, RankGroupChannel]:
        """Return the node's vectors and channel, as ``NewNode.attach``. Ranks but the leader get empty vectors."""
        if self._new_node is None:
            return NoVectors(), RankGroupChannel(self._ranks, None)
        vectors, channel = self._new_node.attach(layout)
        assert isinstance(channel, Channel)
        return vectors, RankGroupChannel(self._ranks, channel)


class _Part(NamedTuple):
    """Elements ``first`` to ``last`` of one parameter, which lie at ``start`` to ``stop`` of the flat vector."""

    first: int
    last: int
    start: int
    stop: int


class RankGroupParameters:
    """The counterpart of ``FlatParameters`` for a rank group. ``vector`` and ``at`` matter at the leader only."""

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], tensors: Sequence[TensorSpec], layout: Layout, island: RankGroup
    ) -> None:
        """Assign the parts of the parameters to shards.

        Raises:
            ValueError: the parameters are not the tensors of the manifest.
        """
        given = list(named)
        check_tensors(given, tensors)
        self._parameters = [parameter for _, parameter in given]
        self._ranks = island
        self.layout = layout
        self.everything: tuple[ShardId, ...] = tuple(shard.shard for shard in layout.shards)
        self._shards: list[list[tuple[int, _Part]]] = []
        for shard in layout.shards:
            parts = []
            for index, at in zip(layout.order, layout.starts, strict=True):
                start = max(shard.start, at)
                stop = min(shard.stop, at + tensors[index].elements)
                if start < stop:
                    parts.append((index, _Part(start - at, stop - at, start, stop)))
            self._shards.append(parts)

    def pin(self, vectors: Sequence[Tensor]) -> None:
        """Do nothing: copies of a rank group are not page-locked."""

    def unpin(self, vectors: Sequence[Tensor]) -> None:
        """Do nothing."""

    def copy_from(self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int] = ()) -> None:
        """Set the parameters of these shards to ``vector``, on all ranks."""
        self._take(vector, shards, at, replace=True)

    def add_from(self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int] = ()) -> None:
        """Add ``vector`` to the parameters of these shards, on all ranks."""
        self._take(vector, shards, at, replace=False)

    @torch.no_grad()
    def copy_to(self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int] = ()) -> None:
        """Copy the parameters of these shards to ``vector``, at the leader."""
        for index, parts in self._by_parameter(shards, at):
            full = _whole(self._parameters[index]).flatten()
            if self._ranks.is_leader:
                for part in parts:
                    vector[part.start : part.stop].copy_(full[part.first : part.last])

    @torch.no_grad()
    def _take(self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int], *, replace: bool) -> None:
        for index, parts in self._by_parameter(shards, at):
            parameter = self._parameters[index]
            full = _whole(parameter)
            flat = full.flatten()  # a view of a plain parameter that is contiguous
            for part in parts:
                piece = torch.empty(part.last - part.first, device=flat.device)
                if self._ranks.is_leader:
                    piece.copy_(vector[part.start : part.stop])
                self._ranks.share(piece)
                own = flat[part.first : part.last]
                if replace:
                    own.copy_(piece)
                else:
                    own.add_(piece)
            if isinstance(parameter, DTensor):
                changed = distribute_tensor(
                    flat.view(full.shape), parameter.device_mesh, parameter.placements, src_data_rank=None
                )
                parameter.to_local().copy_(changed.to_local())
            elif flat.data_ptr() != parameter.data_ptr():
                parameter.copy_(flat.view(full.shape))

    def _by_parameter(self, shards: Iterable[ShardId], at: Sequence[int]) -> list[tuple[int, list[_Part]]]:
        """Group the shards' parts by parameter, so that each is gathered once, in the flat vector's order."""
        found: dict[int, list[_Part]] = {}
        for shard, moved in moves(self.layout, shards, at):
            for index, part in self._shards[shard]:
                placed = _Part(part.first, part.last, part.start + moved, part.stop + moved)
                found.setdefault(index, []).append(placed)
        return list(found.items())


def _whole(parameter: Tensor) -> Tensor:
    """Return the parameter's full value, gathered from all ranks if it is sharded. All ranks must call it."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
