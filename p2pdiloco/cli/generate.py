"""``p2pdiloco generate``: Sample text from a run's newest checkpoint, or from a folder that ``p2pdiloco export`` has
written. The run may continue meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from p2pdiloco.cli import peer_options
from p2pdiloco.node.results import find_result
from p2pdiloco.training.export import ABOUT
from p2pdiloco.training.generation import Sampling, continue_with, continue_with_export


async def run(arguments: argparse.Namespace) -> int:
    """Write to standard output."""
    peer_options.say(await asyncio.to_thread(_generate, arguments))
    return 0


def _generate(arguments: argparse.Namespace) -> str:
    how = Sampling(tokens=arguments.tokens, temperature=arguments.temperature, seed=arguments.seed)
    if (Path(arguments.source) / ABOUT).is_file():
        return continue_with_export(Path(arguments.source), arguments.prompt, how)
    checkpoint = find_result(arguments.source, arguments.state, arguments.run).checkpoint
    places = {"model": arguments.model, "tokenizer": arguments.tokenizer}
    return continue_with(checkpoint.manifest, checkpoint.theta, arguments.prompt, how, **places)
