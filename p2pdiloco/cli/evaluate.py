"""``p2pdiloco evaluate``: Measure the held-out loss of a run's newest checkpoint on this machine. The run may continue
meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio

from p2pdiloco.cli import peer_options
from p2pdiloco.node.results import find_result
from p2pdiloco.training.corpus import load_corpus
from p2pdiloco.training.evaluation import given_samples, held_out_loss
from p2pdiloco.training.export import built
from p2pdiloco.training.models import vocabulary


async def run(arguments: argparse.Namespace) -> int:
    """Measure, and say what was found."""
    await asyncio.to_thread(_evaluate, arguments)
    return 0


def _evaluate(arguments: argparse.Namespace) -> None:
    result = find_result(arguments.source, arguments.state, arguments.run)
    manifest = result.checkpoint.manifest
    config = manifest.config
    given = None if arguments.data else given_samples(manifest)
    corpus = None
    if given is None:
        corpus = load_corpus(config.data, arguments.data, arguments.tokenizer, context=config.model.context)
    symbols = given if corpus is None else corpus.held_out
    if symbols is not None and int(symbols.max()) >= vocabulary(config.model):
        raise ValueError("the data has symbols that the model does not know: give the run's own --data and --tokenizer")
    samples = len(given) if given is not None else arguments.samples or config.evaluation.samples
    model = built(manifest, result.checkpoint.theta, arguments.model)
    loss = held_out_loss(model, corpus, config.model.context, samples, "cpu", given)
    peer_options.say(
        f"run {config.name} at step {result.step}, {result.tokens:,} tokens merged: held-out loss {loss:.4f} nats "
        f"a token ({samples} {'windows of these data' if given is None else 'windows of the run itself'})"
    )
