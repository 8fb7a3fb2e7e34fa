"""``p2pdiloco doctor``: Check what this machine can do as a peer, and say how to fix what it cannot. With an
address, also check that the directory answers and whether others can dial this machine; with an invite, or if the
directory knows a run, also measure tokens/s with its model, memory and disk. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json

import msgspec

from p2pdiloco.cli import peer_options
from p2pdiloco.cli.errors import FAILED
from p2pdiloco.discovery.dht import CLOCK
from p2pdiloco.discovery.directory import Directory, DirectoryError
from p2pdiloco.node import diagnostics
from p2pdiloco.node.diagnostics import Finding, MachineEstimate
from p2pdiloco.peer.options import LearnerOptions
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.swarm.credentials import CredentialsError
from p2pdiloco.swarm.limits import approached
from p2pdiloco.swarm.reachability import check_reachability
from p2pdiloco.swarm.run_lookup import DirectoryOptions, LookupFailedError, RunAnswer, RunLookup, open_directory
from p2pdiloco.transport import addresses
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.sockets import everywhere
from p2pdiloco.util.logs import printable

PATIENCE_S = 6.0


async def run(arguments: argparse.Namespace) -> int:
    """Print the findings."""
    findings = diagnostics.checked_here(arguments.state, arguments.device)
    around, runs = await _directory(arguments)
    findings += around
    estimates: dict[str, MachineEstimate] = {}
    for answers in runs:
        told, estimate = await _run(answers, arguments)
        findings += told
        if estimate is not None:
            estimates[answers.run] = estimate
    show(findings, estimates, as_json=arguments.json)
    return FAILED if any(finding.verdict == "failure" for finding in findings) else 0


def show(findings: list[Finding], estimates: dict[str, MachineEstimate], *, as_json: bool) -> None:
    """Print the findings for people or programs."""
    if as_json:
        print(json.dumps(msgspec.to_builtins({"findings": findings, "would_give": estimates})))
    else:
        _print(findings)


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(printable(f"{finding.verdict:<8}{finding.subject:<{width}}  {finding.detail}"))
        if finding.remedy:
            print(printable(f"{'':<8}{'':<{width}}  -> {finding.remedy}"))


async def _directory(arguments: argparse.Namespace) -> tuple[list[Finding], list[RunAnswer]]:
    """Start the libp2p daemon, join the directory, have somebody dial back, look for runs and ask their peers."""
    try:
        invite, first = peer_options.with_invite(arguments.address)
        options = DirectoryOptions(listen=everywhere(), initial_peers=first)
        async with open_directory(Identity.ephemeral(), options, None) as directory:
            findings = [
                Finding("ok", "libp2p daemon", f"starts; visible as {', '.join(directory.visible_addresses()[:2])}")
            ]
            if not first:
                return findings, []
            findings += [Finding("ok", "directory", "answers"), diagnostics.clock(CLOCK)]
            where = addresses.parse(first[0])
            findings.append(diagnostics.path_mtu(where.host, where.port))
            findings.append(await _reach(directory, tuple(arguments.listen or everywhere())))
            try:
                runs = await RunLookup(directory).ask_runs(
                    invite, arguments.run, lambda: peer_options.open_identity(arguments), needs_manifest=True
                )
            except LookupFailedError as error:
                remedy = "start one: p2pdiloco start CONFIG.toml; or look at --run, or ask for a new invite"
                return [
                    *findings,
                    Finding("failure" if invite or arguments.run else "note", "runs", str(error), remedy),
                ], []
            return findings, runs
    except (DirectoryError, CredentialsError, ValueError) as error:
        remedy = "look at the address: a running bootstrap or peer prints it; is its port open?"
        return [Finding("failure", "directory", " ".join(str(error).split()), remedy)], []


async def _reach(directory: Directory, listen: tuple[str, ...]) -> Finding:
    """Check whether others could dial a peer here."""
    try:
        is_dialable, sentence = await check_reachability(directory, listen, PATIENCE_S)
    except OSError as error:
        remedy = "choose another port, or an address that this machine has (0.0.0.0: all)"
        return Finding("failure", "reach", f"cannot listen at {', '.join(listen)}: {error.strerror or error}", remedy)
    return Finding("ok" if is_dialable else "note", "reach", sentence)


async def _run(answers: RunAnswer, arguments: argparse.Namespace) -> tuple[list[Finding], MachineEstimate | None]:
    name = f"run {answers.record.name}"
    if answers.trouble:
        return [Finding("failure", name, answers.trouble, "is its port forwarded and open?")], None
    peers, manifest = answers.peers, answers.manifest
    who = "1 peer answers" if len(peers) == 1 else f"{len(peers)} peers answer"
    findings = [Finding("ok", name, f"{who}, {answers.record.parameters:,} parameters")]
    findings += [
        Finding("warning", name, f"{one.peer[-6:]} is in trouble: {one.trouble}") for one in peers if one.trouble
    ]
    shards = () if manifest is None else Layout.of(manifest).shards
    largest = max((shard.elements for shard in shards), default=0)
    findings += [Finding("warning", name, sentence) for sentence in approached(peers, largest)]
    if manifest is None:
        return findings, None
    if manifest.config.model.kind == "external":
        scripts = "its learners are training scripts: p2pdiloco.DiLoCo takes part, and has the script's own speed"
        return [*findings, Finding("note", "speed", scripts)], None
    learner = LearnerOptions(
        device=arguments.device,
        data=arguments.data,
        tokenizer=arguments.tokenizer,
        model=arguments.model,
        threads=arguments.threads,
    )
    trial = await diagnostics.tried(manifest, learner, arguments.seconds) if arguments.seconds else None
    told, estimate = diagnostics.judged(manifest, trial, peers, arguments.state)
    return findings + told, estimate
