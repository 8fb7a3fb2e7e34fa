"""``p2pdiloco chat``: Continue the lines that you type with a run's newest checkpoint. While the run trains, later
answers come from later versions.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import msgspec

from p2pdiloco.cli import peer_options
from p2pdiloco.cli.errors import FAILED, CommandError, as_command_errors
from p2pdiloco.node.chat import ChatQuestion, TextGenerator
from p2pdiloco.training.generation import Sampling


async def run(arguments: argparse.Namespace) -> int:
    """Answer lines of the standard input until it ends."""
    generator, shown, seed = TextGenerator(), -1, arguments.seed
    question = ChatQuestion(
        source=arguments.source,
        state=str(arguments.state),
        run=arguments.run,
        model=arguments.model,
        tokenizer=arguments.tokenizer,
    )
    with as_command_errors(ValueError):
        await asyncio.to_thread(generator.load, question)
    while (prompt := await _typed()) is not None:
        how = Sampling(tokens=arguments.tokens, temperature=arguments.temperature, seed=seed)
        asked = msgspec.structs.replace(question, prompt=prompt, sampling=how)
        reply = await asyncio.to_thread(generator.answer, asked)
        if reply.error:
            raise CommandError(reply.error, FAILED)
        if reply.step != shown:
            shown = reply.step
            peer_options.say(f"[the model at step {shown:,}]")
        peer_options.say(reply.text)
        seed += 1
    return 0


async def _typed() -> str | None:
    """Return the next line of the standard input; None at its end. On a terminal Ctrl+C ends the wait at once."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
        loop = asyncio.get_running_loop()
        is_there = asyncio.Event()
        loop.add_reader(sys.stdin, is_there.set)
        try:
            await is_there.wait()
        finally:
            loop.remove_reader(sys.stdin)
    line = sys.stdin.readline()
    if not line and sys.stdin.isatty():
        print()
    return line.rstrip("\n") if line else None
