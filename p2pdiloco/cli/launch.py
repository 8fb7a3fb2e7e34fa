"""``p2pdiloco launch``: Rent machines that join a run, through SkyPilot (the extra sky), within a budget. A machine
that costs more per hour than the budget allows is not rented. Each peer shuts down gracefully when its hours are over,
and the machine is returned.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from p2pdiloco.access.invite_code import VARIABLE, clean_invite, decode_invite
from p2pdiloco.cli.errors import FAILED, REPAIR, CommandError, as_command_errors
from p2pdiloco.version import VERSION

SPARE_H = 0.5
"""Of a machine's hours that are paid for and not trained in: it is set up before, and given back after."""
IDLE_MINUTES = 5
CHECKOUT = Path(__file__).parents[2]
RUN = """\
export {variable}={invite}
timeout --signal=USR1 --kill-after=120 {seconds} p2pdiloco join --stay-s 0 {options}
ended=$?
test $ended -eq 124 && ended=0  # its hours are over
exit $ended
"""
"""SIGUSR1 is leaving in order (``node/shutdown_signals.py``)."""


async def run(arguments: argparse.Namespace) -> int:
    """Write the tasks, and hand them over to ``sky``."""
    with as_command_errors(repair=(ValueError,), nobody=()):
        text = task(arguments)
        if arguments.out is not None:
            if str(arguments.out) == "-":
                print(text, end="")
            else:
                arguments.out.touch(mode=0o600)  # the invite is in it
                arguments.out.write_text(text, encoding="utf-8")
                path = shlex.quote(str(arguments.out))
                print(f"{arguments.out}: to rent one machine of it: sky launch -c p2pdiloco-1 --down {path}")
            return 0
        sky = shutil.which("sky")
        if sky is None:
            raise CommandError(
                "the program sky is not there: pip install 'p2pdiloco[sky]', then sky check, which asks for your "
                "clouds' credentials. Or have the task written: --out task.yaml",
                REPAIR,
            )
        return await _hand_over(sky, text, arguments.machines)


def task(arguments: argparse.Namespace) -> str:
    """One machine's, as SkyPilot reads it.

    Raises:
        ValueError: the invite is none, or admits too few peers; another value cannot stand in a script of lines.
    """
    if len(arguments.address) != 1:
        raise ValueError("give one invite: the machines join with it")
    invite = clean_invite(arguments.address[0])
    if (uses := decode_invite(invite).uses) < arguments.machines:
        raise ValueError(
            f"the invite admits {uses} of {arguments.machines} machines: use the one that start printed, or make "
            f"another one (p2pdiloco members add --uses {arguments.machines})"
        )
    for name in ("options", "gpu", "infra", "source"):
        if not (getattr(arguments, name) or "").isprintable():
            raise ValueError(f"--{name} has a line break or another control character: write it in one line")
    hourly = arguments.dollars / arguments.machines / (arguments.hours + SPARE_H)
    options = shlex.split(arguments.options)
    resources: dict[str, object] = {"use_spot": not arguments.no_spot, "max_hourly_cost": round(hourly - 5e-5, 4)}
    if arguments.gpu:
        resources["accelerators"] = arguments.gpu
        options += ["--device", "cuda"]
    if arguments.infra:
        resources["infra"] = arguments.infra
    lines = RUN.format(
        seconds=round(3600 * arguments.hours),
        variable=VARIABLE,
        invite=shlex.quote(invite),
        options=shlex.join(options),
    ).splitlines()
    return "\n".join(
        [
            f"# One of {arguments.machines} machines, of {arguments.dollars:g} dollars together at most.",
            "# It holds an invite: whoever reads this file can join the run.",
            "name: p2pdiloco",
            "resources:",
            *(f"  {name}: {json.dumps(value)}" for name, value in resources.items()),
            *_setup(arguments.source),
            "run: |",
            *(f"  {line}" for line in lines),
            "",
        ]
    )


def _setup(source: str | None) -> list[str]:
    """The checkout that this program runs from travels; a release is what pip gets by its number."""
    if source is None and (CHECKOUT / "pyproject.toml").is_file():
        return [f"workdir: {json.dumps(str(CHECKOUT))}", 'setup: "pip install torch && pip install ."']
    return [f"setup: {json.dumps('pip install ' + shlex.quote(source or f'p2pdiloco=={VERSION}'))}"]


async def _hand_over(sky: str, text: str, machines: int) -> int:
    """One cluster a machine: no machine is another's head, and each is given back when its own peer has ended."""
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-launch-") as folder:
        path = Path(folder) / "task.yaml"
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
        for number in range(1, machines + 1):
            name = f"p2pdiloco-{number}"
            words = ["launch", "-y", "-d", "-c", name, "--down", "-i", str(IDLE_MINUTES), str(path)]
            status = await (await asyncio.create_subprocess_exec(sky, *words)).wait()
            if status:
                print(f"p2pdiloco: sky launch ended with status {status} for {name}", file=sys.stderr)
                return FAILED
            print(
                f"{name} joins the run; to read its log: sky logs {name}; to return it early: sky down {name}",
                flush=True,
            )
    return 0
