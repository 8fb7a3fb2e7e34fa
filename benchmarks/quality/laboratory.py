"""One run of the laboratory: learners train, contributions are merged, learners take the commits, in one process.

Time is counted in steps of the fastest learner. With equal learners everything happens at whole steps; with speeds,
absences and cuts each learner has its own clock, and events come from a heap. Nothing depends on the machine's clock.

1. The schedule is the protocol's: fragment p is due where the global step, that of the learner furthest ahead, equals
   its offset modulo H. The learner that reaches that step announces the round, and the others answer at the end of
   their next step. ``protocol.waiting`` decides when the owner merges.
2. A commit reaches a learner at the end of its first step ``overlap`` steps after the round, or later if it was made
   later: an exchange takes all the time that the schedule allows.
3. A contribution covers what its learner trained since its mark. Carry is the node's shift: new global - old global,
   plus what was sent if it was merged.
4. At the end, one more round of every fragment merges everybody's remaining progress, as real peers do.
"""

from __future__ import annotations

import heapq
import math
import random
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from benchmarks.quality.data import Stream, held_out_losses, text_of
from benchmarks.quality.exchange import Exchange
from benchmarks.quality.learners import ENDLESS, Given, Group, Member, Round, Shift, ended, spells
from benchmarks.quality.settings import Setting
from benchmarks.quality.stacked import MOMENTUM_OF, Stack, Stepping, is_by_muon
from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.codec.merge import Gradient, token_weight
from p2pdiloco.protocol.ids import FragmentId, PeerId, ShardId
from p2pdiloco.protocol.manifest import Layout, make_layout
from p2pdiloco.protocol.response_times import ResponseTimes
from p2pdiloco.protocol.support import Support
from p2pdiloco.protocol.waiting import LEAST_WAIT_STEPS, QuorumView, Waits, decide, grace_window_s
from p2pdiloco.training.dataset_files import Corpus
from p2pdiloco.training.models import build_model, is_embedding
from p2pdiloco.training.parameters import FlatParameters

JITTER = 0.1
"""Learners of different speeds: a step takes this share more or less, at random."""


class Result(NamedTuple):
    """What a run gives."""

    losses: Tensor
    """Held-out loss of the global model by batches of windows."""
    theta: Tensor
    figures: dict[str, float]


class Contribution(NamedTuple):
    """A learner's outer gradient for one shard, with what it declares."""

    gradient: Gradient
    steps: int
    tokens: int


def _peer(index: int) -> PeerId:
    return PeerId(str(index))


def _model(setting: Setting) -> nn.Module:
    if not setting.base:
        return build_model(setting.model_config, setting.seed)
    from benchmarks.quality import hf_learners  # transformers takes seconds

    return hf_learners.build(setting.base, setting.seed)


def _stack(setting: Setting, model: nn.Module, size: int, *, is_compiled: bool, is_narrow: bool) -> Stepping:
    """``size`` learners that step together."""
    if not setting.base:
        samples = setting.batch // (1 if setting.method == "parallel" else setting.learners)
        return Stack(setting, model, size, samples, is_compiled=is_compiled, is_narrow=is_narrow)
    from benchmarks.quality import hf_learners

    return hf_learners.Copies(setting, model, size)


class Laboratory:
    """See the module."""

    def __init__(
        self,
        setting: Setting,
        text: Corpus | None = None,
        *,
        is_compiled: bool = False,
        device: str = "cpu",
        is_narrow: bool = True,
    ) -> None:
        """``text``: instead of the setting's own. ``is_compiled``: by torch.compile, for long runs. ``device``: where
        learners train; the exchange is on the CPU. ``is_narrow``: on a GPU they compute in bfloat16."""
        torch.set_num_threads(1)
        self.setting = setting
        self._device = torch.device(device)
        self.text = text_of(setting.data, setting.vocabulary) if text is None else text
        s = setting
        self._model = _model(s).to(self._device)
        trained = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        named = ((name, p.shape, is_embedding(name)) for name, p in trained)
        self.specs = tensor_specs(named, s.fragments, math.inf)
        self._fragments = s.fragments
        every: list[tuple[str, Tensor]] = [*trained]
        if s.sends_momentum:
            sent = [(MOMENTUM_OF + name, torch.zeros_like(p)) for name, p in trained if is_by_muon(name, p)]
            specs = tensor_specs(((name, p.shape, True) for name, p in sent), s.fragments, math.inf)
            later = (replace(spec, fragment=FragmentId(spec.fragment + s.fragments)) for spec in specs)
            self.specs, self._fragments = (*self.specs, *later), 2 * s.fragments
            every += sent
        self.layout: Layout = make_layout(self.specs, self._fragments, setting.max_shard, setting.merge)
        self._judge = FlatParameters(every, self.specs, self.layout)
        theta = torch.empty(self.layout.elements)
        ended(self._judge.copy_to(theta, self._judge.everything))
        self.exchange = Exchange(setting, self.layout, theta, self.specs)
        self._scratch = torch.empty_like(theta)
        self._random = random.Random(setting.seed)
        self.members: list[Member] = []
        self._groups = self._make_groups(is_compiled, is_narrow)
        self._open: dict[int, Round] = {}
        self._closed: dict[int, Round] = {}
        """The last round of each fragment that was closed: late answers are timed."""
        self._last: dict[ShardId, Tensor] = {}
        """The last change of each shard, where learners predict the next one."""
        self._response_times = ResponseTimes(0)
        self._events: list[tuple[float, int, int]] = []
        """(time, 0: a group's step ends, 1: an owner looks at a round; which)"""
        self._step = 0
        self._trained = 0
        self._lost = 0
        self._contributions = [0] * setting.learners

    def _make_groups(self, is_compiled: bool, is_narrow: bool) -> list[Group]:
        s = self.setting
        learners = 1 if s.method == "parallel" else s.learners
        size = learners if s.is_in_step else 1
        groups = []
        for first in range(0, learners, size):
            stack = _stack(s, self._model, size, is_compiled=is_compiled, is_narrow=is_narrow)
            stream = Stream(
                self.text.train,
                seed=s.seed,
                batch=s.batch,
                context=s.context,
                learners=learners,
                first=first,
                k=size,
                is_parted=s.data in ("parts", "languages"),
                device=self._device,
            )
            flats = [stack.flat(i, self.specs, self.layout) for i in range(size)]
            self.members += [Member(flat, len(self.layout.shards)) for flat in flats]
            step_time = max(s.speeds) / s.speeds[first] if s.speeds else 1.0
            members = list(range(first, first + size))
            groups.append(Group(members, stack, stream, step_time, spells(s.seed, first, s.absent)))
        if s.join_at:
            self.members[-1].is_present = False
        return groups

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Train to the end of the budget, and evaluate the global model."""
        for index in range(len(self._groups)):
            self._again(index, 0.0)
        now = 0.0
        while not self._is_over:
            now, kind, which = heapq.heappop(self._events)
            if kind:
                if which in self._open:
                    self._consider(self._open[which], now)
            else:
                self._boundary(self._groups[which], now)
                self._again(which, now)
        if self.setting.method == "parallel":
            ended(self.members[0].flat.copy_to(self.exchange.theta, self._judge.everything))
        else:
            self._flush(now)
        ended(self._judge.copy_from(self.exchange.average, self._judge.everything))
        losses = held_out_losses(self._model, self.text, self.setting.context)
        return Result(losses, self.exchange.theta, self._figures(losses))

    @property
    def _is_over(self) -> bool:
        return self._progress >= self.setting.steps

    @property
    def _progress(self) -> int:
        """The share of the budget that is trained, as steps of all learners; what was lost does not count."""
        return (self._trained - self._lost) // self.setting.step_tokens

    def _again(self, index: int, now: float) -> None:
        jitter = self._random.uniform(1.0 - JITTER, 1.0 + JITTER) if self.setting.speeds else 1.0
        heapq.heappush(self._events, (now + self._groups[index].step_time * jitter, 0, index))

    def _boundary(self, group: Group, now: float) -> None:
        """A step's end: train it, announce, answer, take what has come."""
        self._come_and_go(group, now)
        if not self.members[group.members[0]].is_present:
            return
        self._train(group, now)
        for member in group.members:
            for sync_round in list(self._open.values()):
                self._answer(sync_round, member, now)
            for sync_round in self._closed.values():
                self._time_answer(sync_round, member, now)
        for sync_round in list(self._open.values()):
            self._consider(sync_round, now)
        for member in group.members:
            self.take(self.members[member], now)

    def _train(self, group: Group, now: float) -> None:
        s = self.setting
        first = self.members[group.members[0]]
        batch = group.stream.next()
        is_alone = group.step < s.alone_until
        global_step = self._step if s.alone_until else self._progress
        group.stack.step(batch[:1].expand_as(batch) if is_alone else batch, self._progress, global_step)
        tokens = s.step_tokens // len(self.members)
        trained = group.members[:1] if is_alone else group.members
        for index in group.members:
            self.members[index].steps += 1
            self.members[index].tokens += tokens * (index in trained)
        self._trained += tokens * len(trained)
        group.step += 1
        if is_alone:
            if group.step == s.alone_until:
                group.stack.forget()
                self._begin_together()
            self._step = group.step
            return
        if first.seen is None and group.step > self._step:
            self._step = group.step
            if s.method != "parallel":
                self._announce(now)
        group.step = max(group.step, self._step)

    def _begin_together(self) -> None:
        """One learner's weights, which all hold already, become the global ones, and nobody has anything to give."""
        ended(self.members[0].flat.copy_to(self.exchange.theta, self._judge.everything))
        for member in self.members:
            member.marks = [(member.steps, member.tokens)] * len(member.marks)

    def _announce(self, now: float) -> None:
        """Open the round that is due at the global step, if one is."""
        s = self.setting
        for fragment in range(self._fragments):
            is_due = (self._step - fragment * s.sync_every // self._fragments) % s.sync_every == 0
            if is_due and fragment not in self._open:
                self._open[fragment] = Round(fragment, now)

    # -- coming and going ----------------------------------------------------------------------------------------------

    def _come_and_go(self, group: Group, now: float) -> None:
        """Spells of absence; the late joiner; the learner that is cut off and comes back."""
        s = self.setting
        index = group.members[-1]
        member, share = self.members[index], self._progress / s.steps
        while now >= group.changes_at:
            group.changes_at = next(group.spells)
            if member.is_present:
                self._lose(member)
            else:
                self._load(member)
        if index != len(self.members) - 1:
            return
        if s.join_at and not member.is_present and share >= s.join_at:
            self._load(member)
        if s.cut and member.seen is None and s.cut[0] <= share < s.cut[1]:
            self.take(member, ENDLESS)
            member.seen = self.exchange.theta.clone()
        if member.seen is not None and share >= s.cut[1]:
            ended(member.flat.add_from(self.exchange.theta - member.seen, member.flat.everything))
            member.seen = None

    def _lose(self, member: Member) -> None:
        """It dies: what it had not given is lost."""
        member.is_present = False
        pieces = zip(self.layout.shards, member.marks, strict=True)
        unmerged = sum(shard.elements * (member.tokens - mark[1]) for shard, mark in pieces)
        self._lost += unmerged // self.layout.elements

    def _load(self, member: Member) -> None:
        """It comes, with the global parameters and nothing to give."""
        member.is_present = True
        member.shifts.clear()
        ended(member.flat.copy_from(self.exchange.theta, member.flat.everything))
        member.marks = [(member.steps, member.tokens)] * len(member.marks)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _answer(self, sync_round: Round, index: int, now: float) -> None:
        """A learner's contribution to an open round."""
        member = self.members[index]
        if index in sync_round.answered or not member.takes_part:
            return
        self._time_answer(sync_round, index, now)
        shards = self.layout.fragments[sync_round.fragment]
        if all(member.marks[shard][1] == member.tokens for shard in shards):
            return
        ended(member.flat.copy_to(self._scratch, shards))
        for shift in member.shifts:  # what it has not taken yet; as ``peer.global_state`` does
            if shift.shard in shards:
                self._scratch[self.exchange.span(shift.shard)] += shift.change
        parcels = {shard: self.exchange.contribute(shard, self._scratch, index) for shard in shards}
        meant = {}
        if not self.setting.feedback:
            spans = ((shard, self.exchange.span(shard)) for shard in shards)
            meant = {shard: self.exchange.theta[span] - self._scratch[span] for shard, span in spans}
        predicted = {
            shard: self._predict(member, shard, parcels[shard].values) for shard in shards if shard in self._last
        }
        sync_round.given[index] = Given(parcels, meant, predicted, member.steps, member.tokens)

    def _predict(self, member: Member, shard: ShardId, sent: Tensor) -> Tensor:
        """Change a learner's shard to what the commit of its contribution will probably make it; returns the change."""
        change = self.setting.predicts * (self._last[shard] + sent)
        self._scratch[self.exchange.span(shard)] = change
        ended(member.flat.add_from(self._scratch, (shard,)))
        return change

    def _time_answer(self, sync_round: Round, index: int, now: float) -> None:
        """Time a learner's first answer to a round, which may be closed already."""
        if index not in sync_round.answered and self.members[index].takes_part:
            sync_round.answered.add(index)
            self._response_times.record(_peer(index), now - sync_round.opened_at)

    def _consider(self, sync_round: Round, now: float) -> None:
        """The owner's decision; see ``protocol.waiting``."""
        s = self.setting
        participants = {index for index, member in enumerate(self.members) if member.takes_part}
        missing, limit = list(map(_peer, participants - sync_round.answered)), max(s.sync_every / 2, LEAST_WAIT_STEPS)
        quorum = max(1, min(s.quorum, len(participants)))
        if sync_round.quorum_at is None and len(sync_round.given) >= quorum:
            sync_round.quorum_at = now
        quorum_s = 0.0 if sync_round.quorum_at is None else sync_round.quorum_at - sync_round.opened_at
        grace = grace_window_s(
            grace_share=s.grace, overlap_steps=s.overlap, step_time_s=1.0, quorum_s=quorum_s, sync_s=0.0
        )
        view = QuorumView(
            now=now,
            opened_at=sync_round.opened_at,
            quorum_at=sync_round.quorum_at,
            given=len(sync_round.given),
            answers=Support(len(sync_round.answered), len(sync_round.answered) + len(missing)),
            missing=self._response_times.usual_s(missing),
            min_quorum=quorum,
            rank=0,
            grace_s=grace,
            waits=Waits(takeover_s=ENDLESS, usual_s=limit, nearly_all_s=0.0, few_s=ENDLESS, commit_s=0.0),
            is_extended=s.waits,
        )
        decision = decide(view)
        if decision.is_close:
            self._response_times.record_missing(decision.late, limit)
            self._close(sync_round, now)
        elif decision.look_again_at is not None:
            heapq.heappush(self._events, (decision.look_again_at, 1, sync_round.fragment))
        elif not view.missing:  # nobody has anything to give
            del self._open[sync_round.fragment]

    def _close(self, sync_round: Round, now: float) -> None:
        """Merge, and send the commits on their way."""
        self._open.pop(sync_round.fragment, None)
        self._closed[sync_round.fragment] = sync_round
        given = sorted(sync_round.given.items())
        ready_at = max(now, sync_round.opened_at + self.setting.overlap)
        if self.setting.method == "gossip":
            self._pair(sync_round, ready_at)
            return
        for shard in self.layout.fragments[sync_round.fragment]:
            sent = [self._sent(sync_round, shard, index) for index, _ in given]
            weights = [token_weight(one.tokens, one.steps) for one in sent]
            change = self.exchange.commit(
                shard, [index for index, _ in given], [s.gradient for s in sent], weights, [s.steps for s in sent]
            )
            if self.setting.predicts:
                self._last[shard] = change
            for index, member in enumerate(self.members):
                self._send(member, sync_round.given.get(index), shard, change, ready_at)
        for index, _ in given:
            self._contributions[index] += 1

    def _pair(self, sync_round: Round, ready_at: float) -> None:
        """Send each learner half of what another's parameters differ from its own."""
        shards, learners = self.layout.fragments[sync_round.fragment], list(sync_round.given)
        self._random.shuffle(learners)
        for a, b in zip(learners[::2], learners[1::2], strict=False):
            for shard in shards:
                gap = sync_round.given[a].meant[shard] - sync_round.given[b].meant[shard]
                for index, sign in ((a, 0.5), (b, -0.5)):
                    member = self.members[index]
                    member.marks[shard] = (sync_round.given[index].steps, sync_round.given[index].tokens)
                    member.shifts.append(Shift(ready_at, shard, sign * gap))

    def _sent(self, sync_round: Round, shard: ShardId, index: int) -> Contribution:
        """Return the contribution of the learner of this index to a shard of an open round."""
        one, (steps, tokens) = sync_round.given[index], self.members[index].marks[shard]
        return Contribution(one.parcels[shard].gradient, max(0, one.steps - steps), max(0, one.tokens - tokens))

    def _send(self, member: Member, given: Given | None, shard: ShardId, merged: Tensor, ready_at: float) -> None:
        """One commit to one learner: what it adds, and its new mark."""
        if not member.takes_part:
            return
        change = merged
        if given is not None and given.tokens > member.marks[shard][1]:
            settled = given.parcels[shard].values if self.setting.feedback else given.meant[shard]
            change = change + settled
            if shard in given.predicted:
                change = change - given.predicted[shard]
            member.marks[shard] = (given.steps, given.tokens)
        member.shifts.append(Shift(ready_at, shard, change))

    def take(self, member: Member, now: float) -> None:
        """The learner takes the commits that have reached it."""
        ready = [shift for shift in member.shifts if shift.ready_at <= now]
        member.shifts = [shift for shift in member.shifts if shift.ready_at > now]
        for shift in ready:
            span, shards = self.exchange.span(shift.shard), (shift.shard,)
            match self.setting.adopt:
                case "carry":
                    self._scratch[span] = shift.change
                    ended(member.flat.add_from(self._scratch, shards))
                case "overwrite":
                    ended(member.flat.copy_from(self.exchange.theta, shards))
                    member.marks[shift.shard] = (member.steps, member.tokens)

    def _flush(self, now: float) -> None:
        """The run is complete: what is unmerged is merged."""
        for sync_round in list(self._open.values()):
            self._close(sync_round, now)
        for member in self.members:
            self.take(member, ENDLESS)
            if member.seen is not None:
                raise ValueError("a learner is cut off at the end: its progress would be lost")
        if self.setting.method == "gossip":
            self._mean_of_all()
            return
        for fragment in range(self._fragments):
            sync_round = Round(fragment, now)
            for index in range(len(self.members)):
                self._answer(sync_round, index, now)
            if sync_round.given:
                self._close(sync_round, now)

    def _mean_of_all(self) -> None:
        """Make the global parameters the mean of all learners'."""
        self.exchange.theta.zero_()
        for member in self.members:
            ended(member.flat.copy_to(self._scratch, member.flat.everything))
            self.exchange.theta += self._scratch / len(self.members)

    # -- what came out -------------------------------------------------------------------------------------------------

    def _figures(self, losses: Tensor) -> dict[str, float]:
        out, members = self.exchange, self.members
        total = sum(member.tokens for member in members)
        return {
            "loss": float(losses.double().mean()),
            "trained_tokens": float(total),
            "lost_tokens": float(self._lost),
            "global_steps": float(self._step),
            "up_bytes_per_parameter": out.up_bytes / out.up_parameters if out.up_parameters else 0.0,
            "down_bytes_per_parameter": out.down_bytes / out.down_parameters if out.down_parameters else 0.0,
            "lowered_share": out.lowered / max(1, out.given),
            "shortened_share": out.shortened / max(1, out.given),
            "smallest_share_of_turns": min(self._contributions) / max(1, max(self._contributions)),
        }
