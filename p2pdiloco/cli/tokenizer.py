"""``p2pdiloco tokenizer``: Train a tokenizer (byte-level BPE) from texts, for a run of the built-in model, so that
other programs can use the model.
"""

from __future__ import annotations

import argparse
import asyncio

from p2pdiloco.cli import peer_options
from p2pdiloco.cli.errors import REPAIR, CommandError, as_command_errors
from p2pdiloco.protocol.manifest import DataConfig
from p2pdiloco.training.dataset_files import kind_of
from p2pdiloco.training.tokenizer_training import END, train_tokenizer, write_tokenizer


async def run(arguments: argparse.Namespace) -> int:
    """Train and write it, and say how a run uses it."""
    if (arguments.out / "tokenizer.json").exists():
        raise CommandError(f"{arguments.out} has a tokenizer.json, which a run may use: name another --out", REPAIR)
    with as_command_errors(repair=(ValueError,), nobody=()):
        config = DataConfig(
            kind=arguments.data_kind or kind_of(arguments.texts, "--data-kind"), column=arguments.column
        )
        trained, tokens = await asyncio.to_thread(train_tokenizer, config, str(arguments.texts), arguments.size)
        await asyncio.to_thread(write_tokenizer, trained, arguments.out)
    peer_options.say(
        f"{arguments.out}: a tokenizer of {tokens:,} tokens. A run uses it with this in its configuration file:\n"
        f"  [model]  vocabulary = {tokens}\n"
        f'  [data]   kind = "{config.kind}", path = "{arguments.texts}", tokenizer = "{arguments.out}", '
        f'separator = "{END}"\n'
        f"  on each other machine: p2pdiloco join INVITE --data FOLDER --tokenizer {arguments.out} (with a copy of it)"
    )
    return 0
