"""Small documents with a tokenizer of their own, for tests."""

from __future__ import annotations

import json
import random
from pathlib import Path

from swarm import WORDS

VOCABULARY = len(WORDS) + 2


def make_texts(number: int, seed: int = 1) -> list[str]:
    """Documents of about 40 words."""
    words = random.Random(seed)
    return [" ".join(words.choice(WORDS) for _ in range(words.randint(30, 50))) for _ in range(number)]


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of whole words, as the library itself writes it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    known = {word: index for index, word in enumerate(["[UNK]", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_documents(folder: Path, kind: str, texts: list[str]) -> Path:
    """``texts`` as files of ``kind``, two of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, part in enumerate((texts[::2], texts[1::2])):
        if kind == "jsonl":
            (folder / f"{index}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        elif kind == "parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(
                pyarrow.table({"number": list(range(len(part))), "text": part}), folder / f"{index}.parquet"
            )
        else:
            for number, text in enumerate(part):
                (folder / f"{index}-{number}.txt").write_text(text)
    return folder
