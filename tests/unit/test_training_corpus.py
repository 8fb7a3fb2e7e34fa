"""Corpus, batches, the built-in model and its flat parameters, the learning rate, and the shared memory."""

import gzip
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from torch import nn

from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.protocol.data_blocks import MAX_BLOCKS, Block
from p2pdiloco.protocol.ids import FragmentId, RunId
from p2pdiloco.protocol.manifest import (
    BlockSpec,
    DataConfig,
    InnerConfig,
    LoraConfig,
    ModelConfig,
    RunConfig,
    make_layout,
)
from p2pdiloco.training.corpus import Batches, Blocks, cut_into_blocks, data_digest, held_out_batches, load_corpus
from p2pdiloco.training.data_sources import tell_sources
from p2pdiloco.training.dataset_files import Corpus, CorpusError, find_files, is_held_out, mapped
from p2pdiloco.training.evaluation import held_out_loss
from p2pdiloco.training.models import build_model, generate, is_embedding, loss, named_tensors
from p2pdiloco.training.optimizers import learning_rate
from p2pdiloco.training.parameters import FlatParameters, check_tensors
from p2pdiloco.training.shared_memory import SharedVectors

TINY = ModelConfig(width=16, depth=1, heads=2, context=8)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def write_files(root: Path, count: int) -> DataConfig:
    (root / "deep").mkdir(parents=True)
    for i in range(count):
        (root / "deep" / f"{i}.txt").write_text(f"file {i} of the corpus\n" * 5)
    return DataConfig(kind="files", pattern="*.txt", held_out_share=0.3)


# ------------------------------------------------------------------------------------------------------------- corpus


def test_files_go_to_one_split_as_a_whole(tmp_path: Path) -> None:
    config = write_files(tmp_path / "a", 20)
    corpus = load_corpus(config, str(tmp_path / "a"), context=8)
    text = bytes(corpus.held_out.tolist()).decode()
    held = {i for i in range(20) if is_held_out(f"deep/{i}.txt", 0.3)}
    assert 0 < len(held) < 20
    assert {int(line.split()[1]) for line in text.splitlines()} == held
    assert corpus.train.numel() + corpus.held_out.numel() == sum(
        5 * len(f"file {i} of the corpus\n") for i in range(20)
    )


@pytest.mark.parametrize("names", [["book.txt"], ["a.txt", "book.txt"], ["held.txt"]])
def test_the_tails_of_files_are_held_out_where_a_split_would_be_empty(names: list[str], tmp_path: Path) -> None:
    """A single book, or files that all happen to go to one split. Before, nobody could train on them."""
    share = 0.3 if names != ["held.txt"] else 0.95
    assert len({is_held_out(name, share) for name in names}) == 1
    for name in names:
        (tmp_path / name).write_bytes(b"t" * 700 + b"h" * 300 if share == 0.3 else b"t" * 50 + b"h" * 950)
    config = DataConfig(kind="files", pattern="*.txt", held_out_share=share)
    corpus = load_corpus(config, str(tmp_path), context=8)
    assert (set(corpus.train.tolist()), set(corpus.held_out.tolist())) == ({ord("t")}, {ord("h")})
    assert corpus.train.numel() + corpus.held_out.numel() == 1000 * len(names)


@pytest.mark.parametrize("names", [["book.txt"], ["book.gz"], ["0.txt", "1.txt.gz", "2.txt", "3.txt.zst"]])
def test_data_that_do_not_fit_into_memory_are_the_same_and_mapped(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One file is mapped where it is; several, and compressed ones, are copied once. Before, all was cut at 4 GiB."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compress = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress, ".txt": bytes}
    (tmp_path / "texts").mkdir()
    for name in names:
        text = "".join(f"line {number} of {name}\n" for number in range(500)).encode()
        (tmp_path / "texts" / name).write_bytes(compress[Path(name).suffix](text))
    config = DataConfig(kind="files", pattern="*", held_out_share=0.3)
    before = load_corpus(config, str(tmp_path / "texts"), context=8)
    monkeypatch.setattr("p2pdiloco.training.corpus.MEMORY_BYTES", 100)
    monkeypatch.setattr("p2pdiloco.training.dataset_files.PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO, "p2pdiloco"):
        found = [load_corpus(config, str(tmp_path / "texts"), context=8) for _ in range(2)]
    for one in found:
        assert torch.equal(one.train, before.train)
        assert torch.equal(one.held_out, before.held_out)
    fields = [record.__dict__["fields"] for record in caplog.records if record.message == "data-read"]
    assert (fields[0]["files"], fields[0]["bytes"]) == (len(names), before.train.numel())
    is_copied = names != ["book.txt"]
    assert (tmp_path / "cache").exists() == is_copied
    assert ("reading-data" in caplog.messages) == is_copied, "a long start tells how far it is"
    if is_copied:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
        (tmp_path / "texts" / names[0]).touch()
        with pytest.raises(CorpusError, match="free space there, or set XDG_CACHE_HOME"):
            load_corpus(config, str(tmp_path / "texts"), context=8)


@pytest.mark.parametrize("size", [1 << 40, 1 << 21])
def test_a_file_with_holes_is_refused_whatever_its_size(size: int, tmp_path: Path) -> None:
    """Before, a terabyte took a minute and 9 GB of memory, and founded a run on NULs."""
    with (tmp_path / "a.txt").open("wb") as file:
        file.write(b"text" * 2000)
        file.truncate(size)
    with pytest.raises(CorpusError, match=r"a.txt has NUL bytes instead of text"):
        load_corpus(DataConfig(kind="files", pattern="*.txt"), str(tmp_path))


def test_a_file_that_is_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "tokens").touch()
    os.truncate(tmp_path / "tokens", 1 << 40)
    assert mapped(tmp_path / "tokens", np.int32)[-1] == 0


def test_samples_that_are_too_many_to_shuffle_have_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Corpus(train=torch.zeros(10_000, dtype=torch.uint8), held_out=torch.zeros(100, dtype=torch.uint8))
    assert cut_into_blocks(found, 8, 4, 16).number
    monkeypatch.setattr("p2pdiloco.training.corpus.MOST_SAMPLES", 1000)
    assert not cut_into_blocks(found, 8, 4, 16).number


def test_another_folder_with_the_same_files_splits_alike(tmp_path: Path) -> None:
    config = write_files(tmp_path / "a", 20)
    write_files(tmp_path / "b", 20)
    first, second = load_corpus(config, str(tmp_path / "a")), load_corpus(config, str(tmp_path / "b"))
    assert torch.equal(first.held_out, second.held_out)
    assert torch.equal(first.train, second.train)


def test_reading_stops_at_the_bound(tmp_path: Path) -> None:
    corpus = load_corpus(write_files(tmp_path / "a", 20), str(tmp_path / "a"), max_bytes=1500)
    assert corpus.train.numel() + corpus.held_out.numel() == 1500


def test_the_standard_library_is_there() -> None:
    corpus = load_corpus(DataConfig(), max_bytes=1 << 20, context=128)
    assert corpus.train.numel() > 10 * corpus.held_out.numel() > 1290


@pytest.mark.parametrize(
    ("pattern", "folder", "says"),
    [
        ("", "/nonexistent", "not a folder"),
        ("", None, "give --data FOLDER"),
        ("*.none", "a", "no file"),
        ("/etc/*", "a", "cannot be searched"),
        ("bit.txt", "a", "split"),
    ],
)
def test_errors_say_what_to_do(tmp_path: Path, pattern: str, folder: str | None, says: str) -> None:
    write_files(tmp_path / "a", 3)
    (tmp_path / "a" / "deep" / "bit.txt").write_text("a bit")
    with pytest.raises(CorpusError, match=says):
        load_corpus(DataConfig(kind="files", pattern=pattern), folder and str(tmp_path / folder))


@pytest.mark.parametrize("kind", ["files", "text", "jsonl", "parquet", "stdlib"])
def test_what_a_manifest_says_of_folders_is_never_read(tmp_path: Path, kind: Any) -> None:
    """A stranger's manifest names the joiner's private files; the joiner has named nothing, or something else."""
    write_files(tmp_path / "private", 20)
    (tmp_path / "private" / "tokenizer.json").write_text("{}")
    private = str(tmp_path / "private")
    config = DataConfig(kind=kind, path=private, tokenizer=private, pattern="*", held_out_share=0.3)
    if kind == "stdlib":
        assert torch.equal(load_corpus(config).train, load_corpus(DataConfig(held_out_share=0.3)).train)
        return
    with pytest.raises(CorpusError, match="give --data FOLDER"):
        load_corpus(config)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.txt").write_text("mine")
    with pytest.raises(CorpusError) as caught:
        load_corpus(config, str(tmp_path / "own"))
    assert "private" not in str(caught.value)


# fmt: off
SECRETS = [
    ".env", ".ssh/id_rsa", "deep/.hidden/notes.txt", "id_ed25519", "ID_RSA", "id_ecdsa_sk", "id_rsa.bak",
    "server.key", "server.KEY", "a.pem", "server.PEM", "server.pem.bak", "apple.p8", "cert.p12", "cert.PFX",
    "store.jks", "putty.ppk", "passwords.kdbx", "old.kdb", "backup.gpg", "key.der", "my-private.asc", "secring.gpg",
    ".netrc", "_netrc", ".npmrc", ".pgpass", "pgpass.conf", ".git-credentials", "git-credentials", ".aws/credentials",
    "credentials", "credentials.json", "admin_accessKeys.csv", "rootkey.csv", "client_secret_1.apps.json",
    "service-account.json", "my-serviceAccountKey.json", "kubeconfig", "kubeconfig.yaml", "prod.env", "secrets.yaml",
    "wallet.dat", "a.keytab", "terraform.tfstate", ".docker/config.json",
]
DATA = [
    "notes.txt", "train.jsonl", "README.md", "keys.txt", "key.txt", "keyboard.json", "tokens.json", "tokenizer.json",
    "answers.key.txt", "secret.txt", "secret_garden.txt", "id_list.txt", "ids.csv", "elevation.asc", "private.txt",
    "credentials_of_a_spy.txt", "shadow.txt", "environment.py", "password_strength.py", "test.pemmican.txt",
    "access_log.csv", "secrets.py", "netrc.py", "special_tokens_map.json",
]
# fmt: on


def test_usual_names_of_data_are_no_secrets(tmp_path: Path) -> None:
    for name in DATA:
        (tmp_path / name).write_text("text")
    _, found = find_files(DataConfig(kind="files", pattern="*"), str(tmp_path))
    assert {path.name for path in found} == set(DATA)


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("pattern", ["*", "**/*", ".*", "id_*", "*.key", "*.[pP]*"])
def test_a_pattern_reaches_no_hidden_file_and_no_key(tmp_path: Path, name: str, pattern: str) -> None:
    """The founder of the run chooses the pattern; the folder is the joiner's."""
    secret = tmp_path / "a" / name
    secret.parent.mkdir(parents=True)
    secret.write_text("secret")
    with pytest.raises(CorpusError, match="hidden files and keys aside"):
        find_files(DataConfig(kind="files", pattern=pattern), str(tmp_path / "a"))
    (tmp_path / "a" / "plain.txt").write_text("text")
    if pattern in ("*", "**/*"):
        _, found = find_files(DataConfig(kind="files", pattern=pattern), str(tmp_path / "a"))
        assert [path.name for path in found] == ["plain.txt"]


def test_what_will_be_read_is_told_before(tmp_path: Path) -> None:
    write_files(tmp_path / "a", 3)
    config = RunConfig(name="x", data=DataConfig(kind="files", path="/etc", pattern="*.txt"))
    assert tell_sources(config, str(tmp_path / "a"), None, None) == [
        f"trains on 3 files below {tmp_path / 'a'} that match '*.txt' (--data)"
    ]
    with pytest.raises(CorpusError, match="give --data FOLDER"):
        tell_sources(config, None, None, None)
    assert "this machine's Python standard library" in tell_sources(RunConfig(name="x"), None, None, None)[0]
    script = RunConfig(name="x", model=ModelConfig(kind="external"))
    assert tell_sources(script, None, None, None) == []
    adapters = RunConfig(name="x", model=ModelConfig(kind="huggingface", lora=LoraConfig()))
    with pytest.raises(ValueError, match="give --model FOLDER"):
        tell_sources(adapters, None, None, None)
    assert "weights in /w" in tell_sources(adapters, None, None, "/w")[1]


def test_tensors_of_another_order_are_not_the_manifests() -> None:
    specs = tensor_specs(named_tensors(build_model(TINY, 0)), 2)
    given = [(name, p) for name, p in build_model(TINY, 0).named_parameters()]
    check_tensors(given, specs)
    with pytest.raises(ValueError, match=f"{given[1][0]} is in another position"):
        check_tensors([given[1], given[0], *given[2:]], specs)


def test_a_model_that_is_not_the_manifests_is_not_allocated() -> None:
    specs = tensor_specs(named_tensors(build_model(TINY, 0)), 2)
    assert sum(p.numel() for p in build_model(TINY, 0, specs).parameters()) == sum(t.elements for t in specs)
    huge = ModelConfig(width=2**16, depth=1, heads=1024, context=8, vocabulary=2**20)  # half a terabyte
    with pytest.raises(ValueError, match="the model's tensors differ from the run's: embed"):
        build_model(huge, 0, specs)
    with pytest.raises(ValueError, match=r"model\.depth = 4096"):
        build_model(ModelConfig(depth=4096), 0, specs)


def test_blocks_that_do_not_fit_the_data_are_refused() -> None:
    corpus = Corpus(train=torch.zeros(1000, dtype=torch.uint8), held_out=torch.zeros(100, dtype=torch.uint8))
    spec = BlockSpec(number=40, samples=8, data=data_digest(corpus))
    with pytest.raises(CorpusError, match="40 blocks of 8 samples"):
        Blocks(corpus, 8, 4, spec, RunId("r"))


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    config = write_files(tmp_path / "a", 20)
    target = tmp_path / "a" / "deep" / "0.txt"
    target.unlink()
    target.symlink_to("/proc/self/mem")  # opens, but reading its first page fails, for root too
    with pytest.raises(CorpusError, match="cannot be read"):
        load_corpus(config, str(tmp_path / "a"))


def small_corpus() -> Corpus:
    return Corpus(train=torch.arange(200, dtype=torch.uint8), held_out=torch.arange(100, 180, dtype=torch.uint8))


def test_batches_repeat_for_a_seed_and_differ_between_seeds() -> None:
    draw = [next(Batches(small_corpus(), 8, 4, seed)) for seed in ("a", "a", "b")]
    assert draw[0].shape == (4, 9)
    assert draw[0].dtype == torch.int64
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])
    assert bool((draw[0].diff(dim=1) == 1).all())  # contiguous windows


def test_batches_reach_both_ends() -> None:
    corpus = Corpus(train=torch.arange(12, dtype=torch.uint8), held_out=torch.arange(12, dtype=torch.uint8))
    seen = next(Batches(corpus, 8, 200, "x"))
    assert (int(seen.min()), int(seen.max())) == (0, 11)


def test_held_out_windows_are_fixed_and_spread() -> None:
    batches = list(held_out_batches(small_corpus(), 8, 20, batch=16))
    assert [len(b) for b in batches] == [16, 4]
    whole = torch.cat(batches)
    assert (int(whole.min()), int(whole.max())) == (100, 179)
    with pytest.raises(CorpusError, match="held-out"):
        list(held_out_batches(small_corpus(), 80, 4))


# -------------------------------------------------------------------------------------------------------------- model


def test_default_model_has_the_documented_size() -> None:
    model = build_model(ModelConfig(), 0)
    assert sum(p.numel() for p in model.parameters()) == 869_504
    assert sum(1 for _ in model.parameters()) == 27
    assert [name for name, _ in model.named_parameters() if is_embedding(name)] == ["embedding.weight"]


def test_weights_follow_from_the_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = [p.detach().clone() for p in build_model(TINY, 1).parameters()]
    torch.manual_seed(6)
    second = list(build_model(TINY, 1).parameters())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], next(build_model(TINY, 2).parameters()))
    torch.manual_seed(5)
    assert torch.equal(before, torch.random.get_rng_state())


def test_first_loss_is_that_of_a_guess() -> None:
    batch = next(Batches(small_corpus(), 8, 16, "x"))
    assert float(loss(build_model(TINY, 0), batch).detach()) == pytest.approx(5.545, abs=0.05)


def test_attention_is_causal_and_knows_positions() -> None:
    model = build_model(ModelConfig(width=32, depth=2, heads=2, context=8), 0)
    a = torch.tensor([[1, 2, 3, 4, 5]])
    b = torch.tensor([[1, 2, 3, 9, 9]])
    assert torch.allclose(model(a)[:, :3], model(b)[:, :3], atol=1e-6)
    assert not torch.allclose(model(a)[:, 3:], model(b)[:, 3:], atol=1e-4)
    same = model(torch.tensor([[2, 1, 7]]))[0, -1], model(torch.tensor([[1, 2, 7]]))[0, -1]
    assert not torch.allclose(*same, atol=1e-6)


def test_a_little_training_learns_a_little_text() -> None:
    model = build_model(TINY, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    corpus = Corpus(train=torch.tensor(list(b"abcd" * 30), dtype=torch.uint8), held_out=torch.tensor(list(b"bcda" * 9)))
    batches = Batches(corpus, 8, 8, "x")
    before = held_out_loss(model, corpus, 8, 8, "cpu")
    for _ in range(60):
        optimizer.zero_grad()
        loss(model, next(batches)).backward()
        optimizer.step()
    assert held_out_loss(model, corpus, 8, 8, "cpu") < before / 4
    assert generate(model, b"ab", 6, 0.0, 0) == b"abcdabcd"


def test_generation_repeats_for_a_seed_and_accepts_an_empty_prompt() -> None:
    model = build_model(TINY, 0)
    assert generate(model, b"x", 20, 1.0, 3) == generate(model, b"x", 20, 1.0, 3)
    assert generate(model, b"x", 20, 1.0, 3) != generate(model, b"x", 20, 1.0, 4)
    assert len(generate(model, b"", 5, 1.0, 0)) == 5


class Preferring(nn.Module):
    """A model by which "a" is always the most likely byte, and "b" the next."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(256))
        self.logits.data[[ord("a"), ord("b")]] = torch.tensor([2.0, 1.0])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*tokens.shape, 256)


def test_generation_repeats_a_byte_no_more_often_than_it_is_told() -> None:
    assert generate(Preferring(), b"x", 9, 0.0, 0) == b"xaaaaaaaaa"
    assert generate(Preferring(), b"x", 9, 0.0, 0, longest_run=3) == b"xaaabaaaba"
    assert generate(Preferring(), b"xa", 5, 0.0, 0, longest_run=1) == b"xababab"


# ----------------------------------------------------------------------------------------------------- flat parameters


@pytest.mark.parametrize("max_shard", [1024, 1 << 20])
def test_parameters_and_the_flat_vector_are_the_same_numbers(max_shard: int) -> None:
    model = build_model(TINY, 0)
    specs = tensor_specs(named_tensors(model), 3)
    layout = make_layout(specs, 3, max_shard, "rda")
    flat = FlatParameters(model.named_parameters(), specs, layout)
    vector = torch.full((layout.elements,), float("nan"))
    flat.copy_to(vector, flat.everything)
    named = dict(model.named_parameters())
    for index, start in zip(layout.order, layout.starts, strict=True):
        spec = specs[index]
        assert torch.equal(vector[start : start + spec.elements].view(spec.shape), named[spec.name])

    fresh = torch.arange(float(layout.elements))
    flat.copy_from(fresh, flat.everything)
    before = fresh.clone()
    flat.add_from(torch.ones(layout.elements), layout.fragments[FragmentId(1)])
    flat.copy_to(fresh, flat.everything)
    touched = torch.zeros(layout.elements)
    for shard in layout.fragments[1]:
        touched[layout.shards[shard].start : layout.shards[shard].stop] = 1
    assert torch.equal(fresh, before + touched)
    assert 0 < touched.sum() < layout.elements


def test_another_model_is_refused() -> None:
    specs = tensor_specs(named_tensors(build_model(TINY, 0)), 2)
    layout = make_layout(specs, 2, 1024, "rda")
    with pytest.raises(
        ValueError,
        match=r"differ from the run's: embedding.weight is \(256, 32\) here and \(256, 16\) there; .*; and 6 more\.",
    ):
        FlatParameters(
            build_model(ModelConfig(width=32, depth=1, heads=2, context=8), 0).named_parameters(), specs, layout
        )


# ------------------------------------------------------------------------------------------------ schedule and memory


def test_learning_rate_by_hand() -> None:
    config = InnerConfig(steps=110, warmup=10, learning_rate=1.0, decay_share=0.5, final_share=0.2)
    assert learning_rate(config, 0, 0) == pytest.approx(0.1)
    assert learning_rate(config, 9, 9) == pytest.approx(1.0)
    assert learning_rate(config, 55, 55) == pytest.approx(1.0)
    assert learning_rate(config, 88, 88) == pytest.approx(0.4)
    assert learning_rate(config, 110, 110) == pytest.approx(0.2)
    assert learning_rate(config, 500, 500) == pytest.approx(0.2)
    assert learning_rate(config, 55, 0) == pytest.approx(0.1)  # a late joiner's first step
    assert learning_rate(InnerConfig(warmup=0, learning_rate=1.0), 0, 0) == 1.0


def test_shared_vectors_are_the_same_memory() -> None:
    with SharedVectors.create(1001) as node:
        with SharedVectors.attach(os.dup(node.fd), 1001) as learner:
            node.shift[:] = 1.0
            learner.snapshot[-1] = 2.0
            assert float(learner.shift.sum()) == 1001.0
            assert float(node.snapshot.sum()) == 2.0
            assert float(node.theta.abs().sum()) == 0.0
            kept = learner.shift
        assert float(kept[0]) == 1.0  # a tensor keeps its memory
        with pytest.raises(ValueError, match="shared memory"):
            SharedVectors.attach(node.fd, 5000)
        fd = node.fd
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)


def blocks_of(size: int = 4000, *, context: int = 10, batch: int = 4, block: int = 8) -> tuple[Corpus, BlockSpec]:
    train = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    corpus = Corpus(train=train, held_out=torch.zeros(20, dtype=torch.uint8))
    return corpus, cut_into_blocks(corpus, context, batch, block)


def test_an_epochs_blocks_hold_each_sample_once_in_another_order_each_time() -> None:
    corpus, spec = blocks_of()
    assert (spec.number, spec.samples) == (398 // 8, 8)
    orders = []
    for epoch in range(2):
        stream = Blocks(corpus, 10, 4, spec, RunId("run"))
        seen = []
        for index in range(spec.number):
            batches = list(stream.batches(Block(epoch * spec.number + index)))
            assert [b.shape for b in batches] == [torch.Size([4, 11])] * 2
            seen += [tuple(sample.tolist()) for batch in batches for sample in batch]
        assert len(set(seen)) == len(seen) == 49 * 8
        orders.append(seen)
    assert orders[0] != orders[1]


def test_peers_with_the_same_data_cut_the_same_blocks_in_any_order_of_asking() -> None:
    corpus, spec = blocks_of()
    a, b = (Blocks(corpus, 10, 4, spec, RunId("run")) for _ in range(2))
    for block in (60, 3, 49, 7):
        assert all(torch.equal(x, y) for x, y in zip(a.batches(Block(block)), b.batches(Block(block)), strict=True))
    c = Blocks(corpus, 10, 4, spec, RunId("another run"))
    assert not torch.equal(next(a.batches(Block(0))), next(c.batches(Block(0))))


def test_blocks_are_whole_batches_and_never_too_many() -> None:
    assert blocks_of(block=6)[1].samples == 8
    assert blocks_of(4_000_000, block=1)[1].number <= MAX_BLOCKS
    assert blocks_of(block=0)[1] == BlockSpec()
    assert blocks_of(block=300)[1] == BlockSpec(number=33, samples=12, data=blocks_of()[1].data)
    assert blocks_of(1000)[1] == BlockSpec(), "98 samples are too few"
    assert blocks_of(11)[1] == BlockSpec()


def test_with_a_budget_of_tokens_the_rate_is_stable_and_falls_with_its_last_part() -> None:
    """By what the swarm has merged, whatever the global step."""
    config = InnerConfig(steps=10**6, tokens=1000, decay_share=0.2, warmup=10, learning_rate=1.0, final_share=0.1)
    rates = [learning_rate(config, 500, 100, merged / 1000) for merged in (0, 500, 800, 900, 980, 1000, 1100)]
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.1, 0.1, 0.1])
    assert learning_rate(config, 4, 100, 0.9) == pytest.approx(0.25)
    assert learning_rate(config, 500, 0, 0) < 0.2


def test_a_run_of_steps_that_says_its_decay_falls_in_a_line_and_to_nothing_if_it_likes() -> None:
    """By the global step."""
    config = InnerConfig(steps=1000, decay_share=0.5, warmup=10, learning_rate=1.0, final_share=0.0)
    rates = [learning_rate(config, step, 100) for step in (4, 500, 750, 1000, 1100)]
    assert rates == pytest.approx([0.5, 1.0, 0.5, 0.0, 0.0])
