"""Models that a run's TOML can name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from p2pdiloco.protocol.manifest import ModelConfig, TensorSpec
from p2pdiloco.training.huggingface import build_huggingface
from p2pdiloco.training.parameters import check_tensors

# -- Built-in transformer ----------------------------------------------------------------------------------------------
# The built-in model: a byte-level decoder-only transformer (RMSNorm, rotary positions, SwiGLU, no biases).
# Rules of this section:
# 1. Embedding and output head are separate tensors. Only the embedding counts as an embedding (``is_embedding``). Its
#    rows of rare tokens hardly move, so it is not merged by radial-directional averaging (arXiv 2604.21428).
# 2. ``build_model`` uses its own random generator. It neither reads nor changes torch's global random state.
#
# The default configuration (width 128, depth 4, 4 heads) has 869,504 parameters in 27 tensors.


ROTARY_BASE = 10_000.0
NORM_EPS = 1e-6
_INIT_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Map [batch, time, width] to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, side]
        q, k = _rotate(q, cosine, sine), _rotate(k, cosine, sine)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        merged: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return merged


class Feed(nn.Module):
    """SwiGLU feed-forward layer. Its hidden width (``feed_width``) is 8/3 of the width, rounded up to a multiple of
    32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = feed_width(width)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, time, width] to the same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        down: Tensor = self.down(F.silu(gate) * up)
        return down


class Block(nn.Module):
    """One pre-normed residual block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.attention = Attention(width, heads)
        self.feed_norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.feed = Feed(width)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Map [batch, time, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        fed: Tensor = x + self.feed(self.feed_norm(x))
        return fed


class Transformer(nn.Module):
    """Maps tokens, int64 [batch, time], to logits, [batch, time, vocabulary]. Time is at most the configured
    context."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.context = config.context
        # No random numbers here: on the meta device, drawing an embedding loads torch's compiler (a second, 40 MB).
        nothing = torch.empty(config.vocabulary, config.width)
        self.embedding = nn.Embedding.from_pretrained(nothing, freeze=False)  # type: ignore[no-untyped-call]
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        cosine, sine = _rotary_tables(config.context, config.width // config.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, [batch, time, vocabulary], of ``tokens``, int64 [batch, time]."""
        time = tokens.shape[1]
        cosine, sine = self.get_buffer("cosine")[:time], self.get_buffer("sine")[:time]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_model(config: ModelConfig, seed: int, tensors: Sequence[TensorSpec] | None = None) -> nn.Module:
    """Build a float32 model on the CPU with weights drawn from ``seed``.

    The weights are normal with standard deviation 0.02, divided by sqrt(2 depth) for the projections back into the
    residual stream (GPT-2). ``tensors``: the manifest's; nothing is allocated if the model has others.

    Raises:
        ValueError: the model's tensors are not ``tensors``.
    """
    if tensors is not None and config.depth > len(tensors):
        raise ValueError(f"model.depth = {config.depth}, but the manifest has only {len(tensors)} tensors")
    with torch.device("meta"):
        shell = Transformer(config)
    if tensors is not None:
        check_tensors(list(shell.named_parameters()), tensors)
    for module in shell.modules():  # not to_empty, which loads sympy (a quarter of a second)
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape)))
    shell.cosine, shell.sine = _rotary_tables(config.context, config.width // config.heads)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in shell.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                is_projection = name.endswith(("attention.out.weight", "feed.down.weight"))
                std = _INIT_STD / (2 * config.depth) ** 0.5 if is_projection else _INIT_STD
                parameter.normal_(0.0, std, generator=generator)
    return shell


def feed_width(width: int) -> int:
    """Return the hidden width of a block's SwiGLU."""
    return -(-8 * width // (3 * 32)) * 32


def is_embedding(name: str) -> bool:
    """Return whether the tensor is the token embedding (the output head is not one)."""
    return name == "embedding.weight"


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Size, bool]]:
    """Yield name, shape and ``is_embedding`` of every trainable tensor, for ``codec.fragments.tensor_specs``."""
    for name, parameter in model.named_parameters():
        yield name, parameter.shape, is_embedding(name)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean next-token cross-entropy in nats (a scalar) over ``batch``, int64 [samples, context + 1].

    The model returns logits, or an object with an attribute ``logits`` (transformers).
    """
    given = model(batch[:, :-1])
    logits: Tensor = given if isinstance(given, Tensor) else given.logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def generate(
    model: nn.Module, prompt: bytes, tokens: int, temperature: float, seed: int, *, longest_run: int | None = None
) -> bytes:
    """Return ``prompt`` continued by ``tokens`` sampled bytes. ``temperature`` 0: always the most likely byte.

    No byte is drawn more than ``longest_run`` times in a row; None: without a limit. An empty prompt stands for a
    newline. Symbols that are not bytes (a vocabulary above 256) are never drawn.
    """
    given = list(prompt or b"\n")
    out = bytes(continue_tokens(model, given, tokens, temperature, seed, symbols=256, longest_run=longest_run))
    return out if prompt else out[1:]


@torch.no_grad()
def continue_tokens(
    model: nn.Module,
    given: list[int],
    tokens: int,
    temperature: float,
    seed: int,
    *,
    symbols: int | None = None,
    end: int | None = None,
    longest_run: int | None = None,
) -> list[int]:
    """Return ``given``, at least one token, continued by ``tokens`` sampled ones, or until ``end`` is drawn.

    The model sees the last ``context`` tokens. Only the first ``symbols`` tokens are drawn; None: all.
    No token is drawn more than ``longest_run`` times in a row; None: without a limit.
    """
    device = next(model.parameters()).device
    context = int(getattr(model, "context", 1024))
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([given], dtype=torch.int64)
    for _ in range(tokens):
        logits = model(text[:, -context:].to(device))[0, -1, :symbols].float().cpu()
        newest = text[0, -longest_run:] if longest_run else text[0, :0]
        if len(newest) == longest_run and bool((newest == newest[-1]).all()):
            logits = logits.index_fill(0, newest[-1:], -torch.inf)
        if temperature > 0.0:
            chances = torch.softmax(logits / temperature, dim=0)
            drawn = torch.multinomial(chances, 1, generator=generator)
        else:
            drawn = logits.argmax().view(1)
        if end is not None and int(drawn) == end:
            break
        text = torch.cat((text, drawn.view(1, 1)), dim=1)
    return [int(token) for token in text[0]]


def _rotary_tables(context: int, side: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each [context, side / 2] (RoFormer, arXiv 2104.09864)."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, side, 2, dtype=torch.float32, device="cpu") / side)
    angles = torch.arange(context, dtype=torch.float32, device="cpu").unsqueeze(1) * frequencies
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair (i, i + side / 2) of x, [batch, heads, time, side], by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1).type_as(x)


# -- Models by name ----------------------------------------------------------------------------------------------------


NO_BASE = "--model is for runs that train adapters (LoRA); this run sends its whole model to peers: leave it out"


def build(
    config: ModelConfig, seed: int, tensors: Sequence[TensorSpec] | None = None, base: str | None = None
) -> nn.Module:
    """Build a float32 model on the CPU, initialised from ``seed``.

    ``tensors``: the manifest's list of the model's tensors. ``base``: the folder with the weights that adapters are
    for.

    Raises:
        ValueError: it cannot be built here. The message says what to do.
    """
    if base is not None and config.lora is None:
        raise ValueError(NO_BASE)
    if config.kind == "huggingface":
        return build_huggingface(config, seed, tensors, base)
    return build_model(config, seed, tensors)


def outline(config: ModelConfig) -> nn.Module:
    """Return the model without memory for its tensors (on torch's "meta" device).

    Raises:
        ValueError: it cannot be built here. The message says what to do.
    """
    with torch.device("meta"):
        return build_huggingface(config, 0) if config.kind == "huggingface" else Transformer(config)


def vocabulary(config: ModelConfig) -> int:
    """Return the number of symbols that the model knows."""
    return int(config.config["vocab_size"]) if config.kind == "huggingface" else config.vocabulary
