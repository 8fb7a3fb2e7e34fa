"""Groups in a whole swarm: real processes of which two at most are merged together, and one that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from swarm import (
    START_S,
    contributors,
    ended,
    is_unblocked,
    learners_held,
    log_lines,
    report_of,
    swarm_in,
    until,
    write_config,
)

from p2pdiloco.demo.local_swarm import Member
from p2pdiloco.protocol.events import Applied
from p2pdiloco.protocol.groups import group_of
from p2pdiloco.protocol.ids import peer_of
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.messages import CommitHeader
from p2pdiloco.transport.identity import Identity
from tests.machine_sim import recorder
from tests.machine_sim.journal import effects_crc, read_journal


def keys_of_groups(folder: Path) -> Iterator[str]:
    """Files of new peers' keys. The peers are of the first and the second of two groups in turn."""
    folder.mkdir()
    for number in count():
        while True:
            path = folder / f"{number}.key"
            if group_of(Identity.load_or_create(path).peer_id, 1) == number % 2:
                break
            path.unlink()
        yield str(path)


def commits_of(member: Member) -> list[CommitHeader]:
    """What its machine has applied, as its journal tells, which replays to the same effects."""
    folder = member.run_folder()
    assert folder is not None
    config, entries = read_journal(folder / "journal.bin")
    machine, found = Machine(config), list[CommitHeader]()
    for entry in entries:
        assert effects_crc(machine.handle(entry.event, entry.now)) == entry.effects_crc
        if isinstance(entry.event, Applied):
            header = machine.view.commit_of(entry.event.shard, entry.event.head)
            found += [] if header is None else [header]
    return found


@pytest.mark.timeout(400)
def test_groups_train_one_model_though_a_peer_is_killed(tmp_path: Path) -> None:
    """A and C are of one group, B and D of the other; D is killed."""
    config = write_config(
        tmp_path, inner_steps=300, inner_batch=16, schedule_sync_every=8, schedule_fragments=2, schedule_together=2
    )
    keys = keys_of_groups(tmp_path / "keys")
    with pytest.MonkeyPatch.context() as patches, swarm_in(tmp_path) as swarm:
        patches.setenv(recorder.VARIABLE, "1")
        address = swarm.start_bootstrap()
        ann = swarm.start_founder("A", config, address, "--identity", next(keys))
        with learners_held(ann):
            others = [swarm.join(name, address, "--identity", next(keys)) for name in "BCD"]
            with learners_held(*others):
                until(ann, lambda: ann.view.live == 4, what="four live peers")
        dan, left = others[-1], [ann, *others[:-1]]
        until(ann, lambda: sum(len(contributors(c)) == 4 for c in ann.view.commits) >= 3, what="commits of all four")
        dan.refresh()
        dan.kill()
        for member in left:
            assert ended(member, 2 * START_S) == 0, log_lines(member)

        reports = [report_of(member) for member in left]
        assert [report["digests"] for report in reports] == [reports[0]["digests"]] * 3
        assert [report["heads"] for report in reports] == [reports[0]["heads"]] * 3
        assert [report["tokens_unmerged"] for report in reports] == [0, 0, 0]
        assert all(is_unblocked(report) for report in reports)
        for member in left:
            _are_made_of_parts(member, dan)
            assert not [line for line in log_lines(member) if "does not deliver" in line], "all collectors are honest"


def _are_made_of_parts(member: Member, dan: Member) -> None:
    """What ``member`` has applied merges the merges of two groups, with Dan's contributions and without."""
    grouped = [header for header in commits_of(member) if header.parts]
    for header in grouped:
        for group in header.groups():
            givers = {peer_of(c.learner) for c in group.contributors}
            assert {group_of(peer, 1) for peer in givers} == {group_of(group.collector, 1)}
    assert any([len(part.members) for part in header.parts] == [2, 2] for header in grouped)
    assert any(part.collector != header.owner for header in grouped for part in header.parts)
    with_dan = [any(peer_of(c.learner) == dan.view.peer for c in header.contributors) for header in grouped]
    last = len(with_dan) - with_dan[::-1].index(True)
    assert sum(len(header.contributors) == 3 and len(header.parts) == 2 for header in grouped[last:]) >= 4
