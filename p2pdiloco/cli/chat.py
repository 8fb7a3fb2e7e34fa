"""``p2pdiloco chat``: Continue the lines that you type with a run's newest checkpoint. While the run trains, later
answers come from later versions.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import suppress

import msgspec

from p2pdiloco.cli import peer_options
from p2pdiloco.cli.errors import FAILED, CommandError
from p2pdiloco.node.chat import ChatQuestion, Narrator
from p2pdiloco.training.generation import Sampling


async def run(arguments: argparse.Namespace) -> int:
    """Answer lines of the standard input until it ends."""
    with suppress(EOFError):
        await asyncio.to_thread(_talk, arguments)
    return 0


def _talk(arguments: argparse.Namespace) -> None:
    narrator, shown, seed = Narrator(), -1, arguments.seed
    question = ChatQuestion(
        source=arguments.source,
        state=str(arguments.state),
        run=arguments.run,
        model=arguments.model,
        tokenizer=arguments.tokenizer,
    )
    while True:
        prompt = input("> " if sys.stdin.isatty() else "")
        how = Sampling(tokens=arguments.tokens, temperature=arguments.temperature, seed=seed)
        reply = narrator.answer(msgspec.structs.replace(question, prompt=prompt, sampling=how))
        if reply.error:
            raise CommandError(reply.error, FAILED)
        if reply.step != shown:
            shown = reply.step
            peer_options.say(f"[the model at step {shown:,}]")
        peer_options.say(reply.text)
        seed += 1
