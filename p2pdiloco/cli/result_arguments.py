"""Options of the commands that read what a run has come to."""

from __future__ import annotations

import argparse
from pathlib import Path

from p2pdiloco.cli.quantities import at_least, between


def export(sub: argparse.ArgumentParser) -> None:
    _add_source(sub, model="folder with the weights (safetensors) that the run began with and did not train")
    sub.add_argument(
        "--format",
        choices=["hf", "safetensors", "peft"],
        help="default: hf; peft for adapters (LoRA), safetensors for runs of scripts",
    )
    sub.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: ./NAME)")
    _add_average(sub)
    sub.add_argument(
        "--like",
        metavar="DIR",
        help="for a run of training scripts: folder with the config.json of the same model, or with the "
        "adapter_config.json of its adapters (LoRA)",
    )


def generate(sub: argparse.ArgumentParser) -> None:
    _add_source(sub)
    _add_average(sub)
    sub.add_argument("--prompt", default="", metavar="TEXT", help="what is continued (default: a line's end)")
    sub.add_argument("--tokens", type=at_least(1), default=200, metavar="N", help="at most (default: %(default)s)")
    sub.add_argument(
        "--temperature", type=between(0, 100), default=0.7, metavar="T", help="0: the likeliest token (default: 0.7)"
    )
    sub.add_argument("--seed", type=at_least(0), default=0, metavar="S", help="of what is drawn (default: %(default)s)")


def evaluate(sub: argparse.ArgumentParser) -> None:
    _add_source(sub)
    sub.add_argument(
        "--data",
        metavar="DIR",
        help="folder (or file of documents) whose held-out part is read (default: the run's own samples, if any)",
    )
    sub.add_argument(
        "--samples", type=at_least(1), metavar="N", help="windows of --data (default: as many as its peers measure)"
    )


def _add_source(
    sub: argparse.ArgumentParser, model: str = "folder with the safetensors that the run's adapters are for"
) -> None:
    """A run's state on this machine."""
    sub.add_argument(
        "source", metavar="RUN", help="a peer's state folder, or the name (or beginning of the id) of a run in --state"
    )
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if the folder holds several runs")
    sub.add_argument("--tokenizer", metavar="DIR", help="folder with the run's tokenizer.json")
    sub.add_argument("--model", metavar="DIR", help=model)


def _add_average(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--average",
        action="store_true",
        help="the running average of the model, where a follower (or a peer with --average) has kept one",
    )
