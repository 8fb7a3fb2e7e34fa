"""GGUF: one file for llama.cpp and the programs that are built on it, made from an export for transformers.

Rules of this file:
1. The values are those of the export, in float32. ``llama-quantize`` makes smaller files of it.
2. Only architectures and tokenizers whose conversion is tested are written. Others are refused: llama.cpp's own
   ``convert_hf_to_gguf.py`` knows more of them.
3. GGUF holds few settings of a model. Others that change what it computes are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from p2pdiloco.training.huggingface import EXTRA, ArchitectureError
from p2pdiloco.training.tokenized_dataset import load_tokenizer

GGUF = "model.gguf"
_OTHERWISE = "export --format hf, and convert that with llama.cpp's convert_hf_to_gguf.py"
# GGUF's name of each architecture, and the values of its settings that llama.cpp computes.
_ARCHITECTURES: dict[str, tuple[str, dict[str, tuple[Any, ...]]]] = {
    "llama": ("llama", {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}),
    "mistral": ("llama", {"hidden_act": ("silu",), "sliding_window": (None,)}),
    "qwen2": ("qwen2", {"hidden_act": ("silu",), "use_sliding_window": (False,)}),
    "qwen3": ("qwen3", {"hidden_act": ("silu",), "use_sliding_window": (False,), "attention_bias": (False,)}),
    "qwen3_moe": (
        "qwen3moe",
        {"hidden_act": ("silu",), "use_sliding_window": (False,), "attention_bias": (False,)}
        | {"norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    ),
    "gpt2": (
        "gpt2",
        {
            "activation_function": ("gelu_new",),
            "scale_attn_by_inverse_layer_idx": (False,),
            "scale_attn_weights": (True,),
        }
        | {"add_cross_attention": (False,)},
    ),
}
_ROTARY_TYPES = ("default",)
# llama.cpp's name for how the text is cut before byte pairs are merged, by the regular expression of tokenizer.json.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CUTS = {rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe", rf"{_WORDS}|\p{{N}}|{_REST}": "qwen2"}
# A tokenizer of bytes has no merges, but llama.cpp needs one. "!!" is no token, so it is split into bytes again.
_NO_MERGE = "! !"
# GGUF's names of tokens at which llama.cpp stops.
_ENDS = ("eos", "eot", "eom")
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")


def write_gguf(folder: Path, target: Path, name: str) -> None:
    """Write the export for transformers in ``folder`` as the file ``target``.

    Raises:
        ArchitectureError: gguf is not installed, or the model or its tokenizer has no tested conversion.
        OSError: the file cannot be written.
    """
    try:
        import gguf
    except ImportError as error:
        raise ArchitectureError(f"GGUF files are written by gguf: {EXTRA}") from error
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = _check_config(config)
    writer = gguf.GGUFWriter(target, architecture)
    try:
        writer.add_name(name)
        _add_settings(writer, config)
        _add_tokenizer(writer, folder, config)
        arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
        names = gguf.get_tensor_name_map(arch, int(config.get("num_hidden_layers", config.get("n_layer"))))
        for written, tensor in _tensors(folder, config, names):
            writer.add_tensor(written, tensor.float().contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _check_config(config: Mapping[str, Any]) -> str:
    """Return GGUF's name of the architecture, if its conversion is tested."""
    kind = str(config.get("model_type"))
    if kind not in _ARCHITECTURES:
        raise ArchitectureError(
            f"GGUF is written for models of type {', '.join(_ARCHITECTURES)}, and this is a {kind}: {_OTHERWISE}"
        )
    architecture, computed = _ARCHITECTURES[kind]
    odd = [f"{key} = {config[key]!r}" for key, values in computed.items() if config.get(key, values[0]) not in values]
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (found := rotary.get("rope_type", rotary.get("type", "default"))) not in _ROTARY_TYPES:
        odd.append(f"rope_type = {found!r}")
    if odd:
        raise ArchitectureError(f"GGUF cannot be written here for a {kind} with {', '.join(odd)}: {_OTHERWISE}")
    return architecture


def _add_settings(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "gpt2":
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    heads, width = config["num_attention_heads"], config["hidden_size"]
    side = config.get("head_dim") or width // heads
    rotary = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(rotary.get("rope_theta", config.get("rope_theta", 10000.0))))
    writer.add_rope_dimension_count(side)
    writer.add_key_length(side)
    writer.add_value_length(side)
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config.get("num_experts", config.get("num_local_experts")))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


# -- Tensors -----------------------------------------------------------------------------------------------------------


def _tensors(folder: Path, config: Mapping[str, Any], names: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by GGUF's names."""
    experts: dict[str, dict[int, Tensor]] = {}
    is_tied = bool(config.get("tie_word_embeddings", config["model_type"] == "gpt2"))
    for name, tensor in _stored(folder):
        if name == "lm_head.weight" and is_tied:
            continue
        if found := _EXPERT.fullmatch(name):
            experts.setdefault(f"{found[1]}.{found[3]}.weight", {})[int(found[2])] = tensor
        else:
            yield _renamed(name, names), _turned(name, tensor, config)
    for name, parts in experts.items():
        yield _renamed(name, names), torch.stack([parts[i] for i in range(len(parts))])


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def _renamed(name: str, names: Any) -> str:
    stem, _, ending = name.rpartition(".")
    found = names.get_name(stem)
    if found is None:
        raise ArchitectureError(f"GGUF has no name for the tensor {name}: {_OTHERWISE}")
    return f"{found}.{ending}"


def _turned(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return a tensor as llama.cpp holds it: Llama's queries and keys with adjacent rotary pairs, and GPT-2's matrices
    transposed."""
    if config["model_type"] == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
        return tensor.T
    heads = 0
    if config["model_type"] in ("llama", "mistral"):
        if ".q_proj." in name:
            heads = config["num_attention_heads"]
        elif ".k_proj." in name:
            heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    if not heads:
        return tensor
    side = tensor.shape[0] // heads
    return tensor.view(heads, 2, side // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


# -- Tokenizer ---------------------------------------------------------------------------------------------------------


def _add_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        writer.add_tokenizer_model("no_vocab")
        return
    import gguf

    told = json.loads(path.read_text(encoding="utf-8"))
    cut = _cut(told)
    added = {one["id"]: one for one in told.get("added_tokens", ())}
    tokens = {index: token for token, index in told["model"]["vocab"].items()}
    tokens |= {index: one["content"] for index, one in added.items()}
    size = config["vocab_size"]
    if max(tokens) >= size:
        raise ArchitectureError(f"the tokenizer has {max(tokens) + 1} tokens, and the model {size}: give the run's own")
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types([_kind(i, tokens, added, kinds) for i in range(size)])
    _add_special(writer, folder, config, tokens)


def _kind(index: int, tokens: Mapping[int, str], added: Mapping[int, Mapping[str, Any]], kinds: Any) -> Any:
    if index not in tokens:
        return kinds.UNUSED
    if index in added:
        return kinds.CONTROL if added[index].get("special") else kinds.USER_DEFINED
    return kinds.NORMAL


def _add_special(writer: Any, folder: Path, config: Mapping[str, Any], tokens: Mapping[int, str]) -> None:
    """Add the merges, the chat template and the special tokens.

    Without the tokens that begin and end a text, llama.cpp takes token 11 for both. A model of bytes has neither, so
    NUL ends its texts.
    """
    import gguf

    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=config["vocab_size"])
    special.merges = special.merges or [_NO_MERGE]
    own = special.special_token_ids
    ends = _ends(folder, config, tokens) or [own.get("eos", 0)]
    ends.sort(key=lambda end: end != own.get("eos"))  # the tokenizer's own end first
    begin = config.get("bos_token_id")
    begin = begin if isinstance(begin, int) and begin in tokens else ends[0]
    first = load_tokenizer((folder / "tokenizer.json").read_bytes()).encode("a").ids[0]
    own |= {"bos": begin, **dict(zip(_ENDS, ends, strict=False))}
    special.add_special_token = {"bos": first == begin and tokens[begin] != "a"}
    special.add_to_gguf(writer, quiet=True)


def _ends(folder: Path, config: Mapping[str, Any], tokens: Mapping[int, str]) -> list[int]:
    """Return the tokens at which transformers stops: those of generation_config.json, or else of config.json."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = generation.get("eos_token_id")
    found = config.get("eos_token_id") if found is None else found
    every = dict.fromkeys(found if isinstance(found, list) else [found])
    ends = [end for end in every if isinstance(end, int) and end in tokens]
    if len(ends) > len(_ENDS):
        raise ArchitectureError(
            f"the model stops at {len(ends)} tokens (eos_token_id = {ends}), and GGUF holds {len(_ENDS)}: {_OTHERWISE}"
        )
    return ends


def _cut(told: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a tokenizer.json."""
    steps = told.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    ends_in_bytes = bool(steps) and steps[-1].get("type") == "ByteLevel" and not steps[-1].get("add_prefix_space")
    is_plain = (told.get("normalizer") or {}).get("type", "NFC") == "NFC"  # llama.cpp does not normalize text
    if told["model"].get("type") == "BPE" and ends_in_bytes and is_plain:
        if len(steps) == 1 and (steps[0].get("use_regex", True) or not told["model"]["merges"]):
            return "gpt-2"
        if len(steps) == 2 and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
            return "smollm"
        if len(steps) == 2 and steps[0].get("type") == "Split" and not steps[1].get("use_regex", True):
            cut = _CUTS.get(steps[0].get("pattern", {}).get("Regex"))
            if cut is not None:
                return cut
    raise ArchitectureError(
        "GGUF is written with byte-level BPE tokenizers as of GPT-2, Llama 3, Qwen 2 and SmolLM, and this one is "
        f"another ({told['model'].get('type')}): {_OTHERWISE}"
    )
