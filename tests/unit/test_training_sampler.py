"""Scripts with the same data train different samples of it; and are told if they do not."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from p2pdiloco.diloco import DiLoCo
from p2pdiloco.training.node_link import Counts
from p2pdiloco.training.sampler import DIGESTS, FirstBatches, OwnSamples, share_loader
from p2pdiloco.training.swarm_view import SwarmView
from p2pdiloco.wire.learner_ipc import Swarm

PEERS = ("ann", "bob", "cid")


def own(me: str, samples: int = 5000, peers: tuple[str, ...] = PEERS) -> OwnSamples:
    return OwnSamples(samples, lambda: (me, peers))


@pytest.mark.parametrize("samples", [3, 1000, 5000, 200_000])
def test_an_epoch_is_parted_among_those_who_train(samples: int) -> None:
    parts = [list(own(me, samples).epoch(2)) for me in PEERS]
    assert sorted(index for part in parts for index in part) == list(range(samples))
    if samples >= 1000:
        assert all(abs(len(part) / samples - 1 / 3) < 0.06 for part in parts), "fair shares"


def test_no_batch_is_the_same_even_where_samples_are() -> None:
    alone = [OwnSamples(1 << 16, lambda me=me: (me, (me,))) for me in ("ann", "bob")]  # type: ignore[misc]
    first, second = ({tuple(batch) for batch in BatchSampler(own, 8, drop_last=False)} for own in alone)
    assert len(first) == len(second) == (1 << 16) // 8
    assert not first & second


def test_a_pass_is_as_long_as_the_data_and_goes_on_where_the_last_one_ended() -> None:
    sampler = own("ann", 3000)
    assert len(sampler) == 3000
    taken = [*sampler, *sampler]
    assert len(taken) == 6000
    times = Counter(taken).values()
    assert max(times) <= 6
    expected = [index for epoch in range(8) for index in own("ann", 3000).epoch(epoch)]
    assert taken == expected[:6000]


def test_who_comes_and_goes_changes_what_is_left_of_the_epoch() -> None:
    members: list[tuple[str, ...]] = [("ann",)]
    indices = OwnSamples(4096, lambda: ("ann", members[0])).epoch(0)
    alone = list(islice(indices, 2048))
    members[0] = ("ann", "bob")
    after = list(indices)
    assert 0.35 * 2048 < len(after) < 0.65 * 2048
    bobs = set(own("bob", 4096, ("ann", "bob")).epoch(0))
    assert not bobs & set(after), "from then on no sample is trained twice"
    assert not set(alone) & set(after)


def test_ranks_of_an_island_divide_what_is_their_peers() -> None:
    ranks = [OwnSamples(999, lambda: ("ann", PEERS), rank=rank, replicas=2) for rank in (0, 1)]
    drawn = [list(rank) for rank in ranks]
    both = [index for pair in zip(*drawn, strict=True) for index in pair]
    assert both == list(islice(own("ann", 999), 998))
    assert not set(list(ranks[0])[:50]) & set(list(ranks[1])[:50]), "the second pass is in step, too"


def test_more_peers_than_samples_still_train() -> None:
    crowd = tuple(f"peer {i}" for i in range(300))
    for me in crowd[:3]:
        assert len(list(own(me, 2, crowd))) == 2


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(8))


@pytest.mark.parametrize("how", [{"shuffle": True}, {"shuffle": False}, {"sampler": DistributedSampler}])
def test_a_loader_is_given_this_peers_samples(how: dict[str, Any]) -> None:
    data = TensorDataset(torch.arange(2000))
    if "sampler" in how:
        how = {"sampler": DistributedSampler(data, num_replicas=2, rank=1)}
    loader = DataLoader(data, batch_size=10, **how)
    number = len(loader)
    assert share_loader(loader, lambda: ("bob", PEERS))
    drawn = [int(index) for (batch,) in loader for index in batch]
    assert len(loader) == number
    assert len(drawn) == (1000 if "sampler" in how else 2000)
    expected = list(islice(own("bob", 2000), 2000))
    assert drawn == (expected[1::2] if "sampler" in how else expected)


class RepeatSampler(torch.utils.data.Sampler[int]):
    """As trl has it: for GRPO, which compares several answers to each prompt."""

    __module__ = "trl.trainer.utils"
    mini_repeat_count, batch_size, repeat_count, length = 4, 3, 2, 1000

    def __len__(self) -> int:
        return self.length // self.batch_size * self.batch_size * self.mini_repeat_count * self.repeat_count


def test_prompts_are_divided_and_the_answers_to_one_stay_together() -> None:
    loader = DataLoader(TensorDataset(torch.arange(1000)), batch_size=12, sampler=RepeatSampler())
    before = len(loader)
    assert share_loader(loader, lambda: ("bob", PEERS))
    drawn = [batch.tolist() for (batch,) in loader]
    assert len(drawn) == len(loader) == before
    prompts = [batch[::4] for batch in drawn]
    assert all(
        batch == [index for index in three for _ in range(4)] for batch, three in zip(drawn, prompts, strict=True)
    )
    assert prompts[::2] == prompts[1::2], "each batch is used twice"
    assert [index for three in prompts[::2] for index in three] == list(islice(own("bob", 1000), 999))


class Labelled(BatchSampler):
    """As sentence-transformers has it: torch's with more attributes. ``Unlike`` makes batches of its own."""


class Unlike(Labelled):
    def __iter__(self) -> Any:
        return super().__iter__()


def test_a_batch_sampler_that_is_torchs_by_another_name_is_given_this_peers_samples() -> None:
    data = TensorDataset(torch.arange(100))
    loaders = [
        DataLoader(data, batch_sampler=kind(torch.utils.data.RandomSampler(data), 10, drop_last=False))
        for kind in (Labelled, Unlike)
    ]
    assert [share_loader(loader, lambda: ("bob", PEERS)) for loader in loaders] == [True, False]
    assert [int(index) for (batch,) in loaders[0] for index in batch] == list(islice(own("bob", 100), 100))


def test_a_stream_is_shared_and_follows_the_peers(caplog: pytest.LogCaptureFixture) -> None:
    link = Link()
    loader, made = DataLoader(Stream(), batch_size=None), view(link)
    assert made.share(loader)
    assert not view(None).share(DataLoader(Stream()))
    part = list(loader)
    assert 0 < len(part) < 8
    link.swarm = Swarm(me="ann", peers=("ann",), figures={}, same_batches="")
    made._look_at_batches(link)  # type: ignore[arg-type]
    assert len(list(loader)) == 8
    assert len(list(view(None).stream(range(8)))) == 8


def test_a_loader_whose_samples_are_its_users_own_is_left_alone() -> None:
    data = TensorDataset(torch.arange(20))
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 20, 20)
    for loader in (DataLoader(Stream()), DataLoader(data, sampler=weighted), [torch.zeros(1)], None):
        assert not share_loader(loader, lambda: ("bob", PEERS))


class Link:
    """What a view sees of its link."""

    def __init__(self, peers: tuple[str, ...] = PEERS, same: str = "") -> None:
        self.swarm = Swarm(me="ann", peers=peers, figures={"loss": 1.5}, same_batches=same)
        self.told: list[tuple[str, ...]] = []

    def batches(self, digests: tuple[str, ...]) -> None:
        self.told.append(digests)


def view(link: Link | None, model: nn.Module | None = None) -> SwarmView:
    made = SwarmView(model or nn.Linear(4, 1), None, has_run=link is not None)
    made._link = link  # type: ignore[assignment]
    return made


def test_a_script_sees_the_swarm() -> None:
    seen = view(Link())
    assert (seen.peers, seen.swarm) == (PEERS, {"loss": 1.5})
    data: Dataset[Any] = TensorDataset(torch.arange(2000))
    shards = [view(Link())._known_peers() for _ in PEERS]
    assert shards[0] == ("ann", PEERS)
    part = seen.shard(data)
    assert sorted(int(sample[0]) for sample in part) == sorted(own("ann", 2000).epoch(0))  # type: ignore[attr-defined]
    nobody = view(None)
    assert nobody.shard(data) is data
    assert (nobody.peers, nobody.swarm) == ((), {})
    assert sorted(nobody.sampler(data)) == list(range(2000))
    assert not nobody.share(DataLoader(data))


def test_the_first_batches_are_told_once_and_then_nobody_looks() -> None:
    model, link = nn.Linear(4, 1), Link()
    seen = view(link, model)
    seen._begin_to_look()
    for i in range(DIGESTS + 3):
        model.eval()
        model(torch.full((2, 4), 100.0 + i))
        model.train()
        model(torch.full((2, 4), float(i)))
        seen._look_at_batches(link)  # type: ignore[arg-type]
    assert [len(told) for told in link.told] == [1, 2, 3, 4]
    assert not model._forward_pre_hooks
    same, other = FirstBatches(), FirstBatches()
    same.add({"x": torch.zeros(2, 4)})
    other.add([torch.zeros(2, 4, dtype=torch.bfloat16)], "no tensor", None)
    assert same.digests[0] == link.told[-1][0], "however it is wrapped"
    assert same.digests != other.digests
    assert all(len(digest) == 16 for digest in link.told[-1])


def test_the_same_batches_elsewhere_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    link = Link(same="12D3KooWbob")
    seen = view(link)
    with caplog.at_level(logging.WARNING, "p2pdiloco"):
        seen._look_at_batches(link)  # type: ignore[arg-type]
        seen._look_at_batches(link)  # type: ignore[arg-type]
    assert [
        record.getMessage().startswith("peer 12D3KooWbob trains the same batches") for record in caplog.records
    ] == [True]


class Waiting(Link):
    """A link at whose boundaries peers come."""

    is_training = True

    def __init__(self, *steps: tuple[str, ...] | None) -> None:
        super().__init__()
        self.coming = list(steps)
        self.boundaries = 0
        self.swarm = None  # type: ignore[assignment]

    def boundary(self) -> bool:
        self.boundaries += 1
        peers = self.coming.pop(0) if self.coming else None
        if peers is not None:
            self.swarm = Swarm(me="ann", peers=peers, figures={})
        return True


@pytest.mark.parametrize(("wanted", "boundaries"), [(1, 2), (2, 3), (3, 4)])
def test_peers_are_waited_for(wanted: int, boundaries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdiloco.training.swarm_view.LOOK_S", 0.0)
    link = Waiting(None, ("ann",), ("ann", "bob"), PEERS)
    seen = view(link)
    seen._is_linked = True
    seen._wait_for_swarm(wanted)
    assert link.boundaries == boundaries, "the node is listened to meanwhile"
    assert len(seen.peers) == wanted


def test_peers_that_do_not_come_are_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("p2pdiloco.training.swarm_view.LOOK_S", 0.0)
    monkeypatch.setattr("p2pdiloco.training.swarm_view.WAIT_S", 0.02)
    monkeypatch.setattr("p2pdiloco.training.swarm_view.KNOWN_S", 0.02)
    seen = view(Waiting(("ann",)))
    seen._is_linked = True
    with caplog.at_level(logging.WARNING, "p2pdiloco"):
        seen._wait_for_swarm(2)
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 2 peers are here: waiting 0 minutes for the others",
        "training begins with 1 of 2 peers",
    ]
    silent = view(Waiting())
    silent._is_linked = True
    silent._wait_for_swarm(1)
    assert silent.peers == (), "a node that says nothing of the others stops nobody"


def test_each_rank_of_several_draws_samples_of_its_own() -> None:
    drawn = []
    for rank in (0, 1):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            sampler = view(None).sampler(range(100))
            drawn.append(list(sampler))
        finally:
            dist.destroy_process_group()
        assert len(sampler) == len(drawn[-1]) == 50
    assert sorted(drawn[0] + drawn[1]) == list(range(100))


def test_inside_the_block_the_model_is_the_swarms() -> None:
    model = nn.Linear(2, 1)
    outer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), run=None)
    with torch.no_grad():
        own = [p.clone() for p in model.parameters()]

        class Global(Link):
            counts, last_step = Counts(), 10

            def load_global(self) -> None:
                for p in model.parameters():
                    p.fill_(7.0)

        with outer.global_parameters():
            assert all(torch.equal(p, o) for p, o in zip(model.parameters(), own, strict=True)), "without a run"
        outer._named = list(model.named_parameters())
        outer._link = Global()  # type: ignore[assignment]

        def evaluate() -> None:
            with outer.global_parameters():
                assert all(bool((p == 7.0).all()) for p in model.parameters())
                raise KeyError("an evaluation that fails")

        with pytest.raises(KeyError):
            evaluate()
        assert all(torch.equal(p, o) for p, o in zip(model.parameters(), own, strict=True))
