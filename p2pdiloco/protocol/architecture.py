"""What a manifest may say about a Hugging Face model: data that another peer wrote, which decides what is built here.

Rules of this file:
1. Plain values only, bounded in number, depth and size. Nothing here knows transformers; whether a key exists for a
   model type is checked where the model is built (``training/huggingface.py``).
2. Keys that make transformers fetch or run code, or load other weights, are refused: ``auto_map``,
   ``attn_implementation`` (kernels from the hub), ``quantization_config`` and the like; so is whatever is private.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec

MAX_BYTES = 1 << 16
MAX_DEPTH = 4
MAX_ITEMS = 1024
MAX_TEXT = 256
MAX_INTEGER = 2**31
MAX_COUNT = 4096
"""Layers, heads, experts: whatever is built one by one."""
MAX_BUILT = 1 << 16
"""Layers times experts."""

_KEY = re.compile(r"[a-z][a-z0-9_]{0,63}")
_COUNT = re.compile(r"(num|n)_")
_MANY = re.compile(r"^(num|n)_.*(layer|expert|block)")
_CHOSEN = re.compile(r"_per_tok|group")
_NOT_COUNTED = frozenset({"n_embd", "n_inner", "n_positions", "n_ctx"})
_REFUSED = frozenset(
    {
        "auto_map",
        "attn_implementation",
        "experts_implementation",
        "name_or_path",
        "quantization_config",
        "trust_remote_code",
        "use_kernels",
        "torch_dtype",
        "dtype",
    }
)


def architecture_problems(config: Mapping[str, object]) -> list[str]:
    """What is impossible in ``model.config``, one sentence each; empty if sound."""
    if not isinstance(config.get("model_type"), str) or not _KEY.fullmatch(str(config["model_type"])):
        return ['model.config must have a model_type, such as "llama"']
    vocabulary = config.get("vocab_size")
    if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or not 2 <= vocabulary <= 2**20:
        return ["model.config.vocab_size must be a whole number from 2 to 1048576"]
    try:
        size = len(msgspec.msgpack.encode(config))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return [f"model.config holds what is no plain value: {error}"]
    if size > MAX_BYTES:
        return [f"model.config has {size} bytes, at most {MAX_BYTES} are allowed"]
    problems = []
    for key, value in config.items():
        if not _KEY.fullmatch(key):
            problems.append(f"model.config has the key {key[:64]!r}: small letters, digits and underscores are allowed")
        elif key in _REFUSED:
            problems.append(f"model.config.{key} is not allowed: it could fetch code or weights; leave it out")
        else:
            limit = MAX_COUNT if _COUNT.match(key) and key not in _NOT_COUNTED else MAX_INTEGER
            problems += [f"model.config.{key} {problem}" for problem in _value_problems(value, limit, MAX_DEPTH)]
    if not problems and (built := _built(config)) > MAX_BUILT:
        problems.append(f"model.config has {built} layers times experts, at most {MAX_BUILT} are allowed")
    return problems


def _built(config: Mapping[str, object]) -> int:
    """Layers times experts, those of parts (``text_config``) included."""
    built = 1
    for key, value in config.items():
        if isinstance(value, dict):
            built *= _built(value)
        elif isinstance(value, int) and _MANY.search(key) and not _CHOSEN.search(key):
            built *= max(1, value)
    return built


def _value_problems(value: object, limit: int, depth: int) -> list[str]:
    match value:
        case None | bool():
            return []
        case int():
            return [] if abs(value) <= limit else [f"= {value} must be at most {limit}"]
        case float():
            return [] if math.isfinite(value) else [f"= {value} must be finite"]
        case str():
            return [] if len(value) <= MAX_TEXT else [f"has {len(value)} letters, at most {MAX_TEXT} are allowed"]
        case list() | tuple() | dict():
            if not depth or len(value) > MAX_ITEMS:
                return [f"is nested deeper than {MAX_DEPTH}, or has more than {MAX_ITEMS} items"]
            if isinstance(value, dict) and not all(isinstance(k, str) and len(k) <= MAX_TEXT for k in value):
                return ["has keys that are no short texts"]
            items = value.values() if isinstance(value, dict) else value
            return [problem for item in items for problem in _value_problems(item, limit, depth - 1)][:1]
        case _:
            return [f"is a {type(value).__name__}, no plain value"]
