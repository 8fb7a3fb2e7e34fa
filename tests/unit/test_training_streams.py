"""Peers with the same stream train different samples of it, whatever their loaders' workers are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain, cycle, islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from p2pdiloco.training.streams import OwnStream, TrainingPeers, share_stream

PEERS = ("ann", "bob", "cid")


class Stream(IterableDataset[dict[str, Any]]):
    """Documents, in an order of their reader's, divided among its workers."""

    def __init__(self, number: int = 600, seed: int = 0) -> None:
        self.order = random.Random(seed).sample(range(number), number)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        for index in self.order[info.id :: info.num_workers] if info else self.order:
            yield {"number": index, "text": f"document {index}"}


def known(me: str, peers: tuple[str, ...] = PEERS) -> TrainingPeers:
    made = TrainingPeers()
    made.write(me, peers)
    return made


def numbers(stream: Any) -> list[int]:
    return [int(sample["number"]) for sample in stream]


def test_a_stream_is_parted_whatever_order_its_readers_have() -> None:
    parts = [numbers(OwnStream(Stream(seed=seed), known(me))) for seed, me in enumerate(PEERS)]
    assert sorted(index for part in parts for index in part) == list(range(600))
    assert all(120 < len(part) < 280 for part in parts), "fair shares"


def test_each_pass_gives_other_samples() -> None:
    stream = OwnStream(Stream(), known("ann"))
    first, second = set(numbers(stream)), set(numbers(stream))
    assert len(first & second) < 0.6 * len(first)


def test_workers_follow_who_joins() -> None:
    """They are other processes, which have run since before."""
    peers = known("ann", ("ann",))
    loader = DataLoader(OwnStream(Stream(4000), peers), batch_size=None, num_workers=2, prefetch_factor=2)
    samples = iter(loader)
    alone = [int(next(samples)["number"]) for _ in range(200)]
    peers.write("ann", ("ann", "bob"))
    rest = numbers(samples)
    assert len(set(alone)) == 200
    assert 0.35 * 3800 < len(rest) < 0.65 * 3800
    bobs = set(numbers(OwnStream(Stream(4000), known("bob", ("ann", "bob")))))
    assert len(bobs & set(rest)) < 20, "what the workers had fetched before"
    drawn = numbers(DataLoader(OwnStream(Stream(), known("ann")), batch_size=None, num_workers=2))
    assert sorted(drawn) == sorted(numbers(OwnStream(Stream(), known("ann")))), "the same with workers as without"


def test_more_peers_than_samples_still_train() -> None:
    crowd = tuple(f"peer {i}" for i in range(300))
    for me in crowd[:5]:
        stream = OwnStream(Stream(2), known(me, crowd))
        assert sum(len(numbers(stream)) for _ in range(2)) >= 1


def test_an_endless_stream_of_few_distinct_samples_reaches_every_peer(caplog: pytest.LogCaptureFixture) -> None:
    """Before, a peer that owned none of them waited for ever, without a word."""
    samples = [{"number": number, "text": f"document {number}"} for number in range(2)]
    idle = [me for me in PEERS if not numbers(OwnStream(samples, known(me)))]
    assert idle, "more peers than samples"
    stream = OwnStream(cycle(samples), known(idle[0]))
    assert {int(sample["number"]) for sample in islice(stream, 10)} == {0, 1}
    assert "too few distinct samples" in caplog.text
    stream = OwnStream(chain(islice(cycle(samples), 500), Stream(600)), known(idle[0]))
    others = [number for number in numbers(stream) if number > 1]
    assert 120 < len(others) < 280, "it takes its own alone once they come"


def test_ranks_of_a_peer_divide_its_samples() -> None:
    ranks = [set(numbers(OwnStream(Stream(), known("ann"), rank=rank, ranks=2))) for rank in (0, 1)]
    assert not ranks[0] & ranks[1]
    assert ranks[0] | ranks[1] == set(numbers(OwnStream(Stream(), known("ann"))))


def test_before_the_start_a_stream_is_whole() -> None:
    assert len(numbers(OwnStream(Stream(), TrainingPeers()))) == 600


def test_loaders_of_streams_are_shared_and_others_are_not() -> None:
    loader = DataLoader(Stream(), batch_size=None)
    assert share_stream(loader, known("ann"))
    assert numbers(loader) == numbers(OwnStream(Stream(), known("ann")))
    assert not share_stream(DataLoader(torch.zeros(4)), known("ann"))  # type: ignore[arg-type]
    assert not share_stream([1, 2], known("ann"))


@pytest.mark.skipif(not all(map(find_spec, ("datasets", "accelerate"))), reason="needs the extra hf")
def test_a_trainers_loader_of_a_hugging_face_stream_is_shared() -> None:
    from accelerate import Accelerator
    from datasets import Dataset

    data = Dataset.from_dict({"number": list(range(600))}).to_iterable_dataset(num_shards=2)
    loader = Accelerator(cpu=True).prepare(DataLoader(data, batch_size=8))
    assert share_stream(loader, known("bob"))
    drawn = [int(index) for batch in loader for index in batch["number"]]
    assert 120 < len(drawn) < 280
    others = [numbers(OwnStream(data, known(me))) for me in ("ann", "cid")]
    assert sorted([*drawn, *others[0], *others[1]]) == list(range(600))
