"""Well-formed values of any of our structs, drawn at random with a liking for bounds: what fuzzing begins with."""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

DEEPEST = 4
"""Lists in lists; below that they are empty if they may be."""


def value_of(kind: Any, rng: Random) -> Any:
    """A value that encodes to what a decoder of ``kind`` takes, as far as types and bounds say."""
    return _drawn(_info(kind), rng, 0)


@lru_cache(maxsize=64)
def _info(kind: Any) -> inspect.Type:
    """Reading a type's annotations takes longer than reading a hundred inputs."""
    return inspect.type_info(kind)


def _drawn(info: inspect.Type, rng: Random, depth: int) -> Any:
    match info:
        case inspect.StructType():
            fields = [(field, _drawn(field.type, rng, depth + 1)) for field in info.fields]
            if not info.array_like:
                return {field.encode_name: value for field, value in fields}
            tag = [] if info.tag is None else [info.tag]
            return [*tag, *(value for _, value in fields)]
        case inspect.UnionType():
            return _drawn(rng.choice(info.types), rng, depth)
        case inspect.IntType():
            low = info.ge if info.ge is not None else -(2**63) if info.gt is None else info.gt + 1
            high = info.le if info.le is not None else 2**63 - 1 if info.lt is None else info.lt - 1
            return rng.choice([low, high, rng.randint(low, high), min(high, max(low, rng.randrange(100)))])
        case inspect.FloatType():
            return rng.choice([0.0, 1.0, -1.0, 1e-300, 1e308, rng.random()])
        case inspect.StrType():
            size = rng.randint(info.min_length or 0, min(info.max_length or 40, 64))
            return "".join(rng.choice("0123456789abcdef") for _ in range(40 if info.pattern else size))
        case inspect.BytesType():
            return rng.randbytes(rng.randint(info.min_length or 0, min(info.max_length or 64, 128)))
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.LiteralType():
            return rng.choice(info.values)
        case inspect.VarTupleType() | inspect.ListType():
            most = 0 if depth > DEEPEST else min(info.max_length or 3, 3)
            return [
                _drawn(info.item_type, rng, depth + 1)
                for _ in range(rng.randint(min(info.min_length or 0, most), most))
            ]
        case inspect.TupleType():
            return [_drawn(one, rng, depth + 1) for one in info.item_types]
        case inspect.DictType():
            return {}
        case inspect.NoneType():
            return None
    return rng.choice([None, 0, "x"])


def encoded(kind: Any, rng: Random) -> bytes:
    """The same in bytes."""
    return msgspec.msgpack.encode(value_of(kind, rng))
