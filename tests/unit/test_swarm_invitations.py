"""Invites as people ask for them: who may give which, which one is shown again, what a follower's lets one do."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from actors import FOUNDER, make_manifest
from troupe import options_of

from p2pdiloco.access.certificates import NEVER, Role
from p2pdiloco.access.invite_code import decode_invite
from p2pdiloco.protocol.manifest import Manifest, ModelConfig
from p2pdiloco.swarm import invitations
from p2pdiloco.swarm.credentials import Credentials, CredentialsError, MemberFiles, credentials_from_invite
from p2pdiloco.swarm.invitations import (
    apply_grant,
    credentials_for_joining,
    credentials_of,
    how_to_join,
    invite_text,
    keep_addresses,
    keep_invite_addresses,
    kept_addresses,
    load_grant,
    load_or_make_invite,
    require_membership,
)
from p2pdiloco.swarm.run_index import MANIFEST, folder_of
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util.status_pipe import Invited, StatusMessage

INVITED = "to join from another machine"

ADDRESS = f"/ip4/127.0.0.1/tcp/4100/p2p/{Identity.ephemeral().peer_id}"
THIRD = f"/ip4/127.0.0.1/tcp/4300/p2p/{Identity.ephemeral().peer_id}"
OTHER = f"/ip4/127.0.0.1/tcp/4200/p2p/{Identity.ephemeral().peer_id}"


def run_with(access: str) -> tuple[Manifest, Credentials]:
    manifest = make_manifest()
    manifest = msgspec.structs.replace(manifest, config=msgspec.structs.replace(manifest.config, access=access))
    return manifest, Credentials(manifest.run, b"", FOUNDER)


def invite(manifest: Manifest, mine: Credentials, folder: Path, **terms: Any) -> str:
    grant = load_grant(manifest, mine, folder, time.time())
    return invite_text(manifest, mine, grant, (ADDRESS,), **terms)


@pytest.mark.parametrize(
    ("access", "terms", "says"),
    [
        ("open", {}, "is open: whoever knows an address"),
        ("list", {}, "takes peers by name only"),
        ("invite", {"max_weight": 0.0}, "--max-weight 0.0: from"),
        ("invite", {"max_weight": 1e9}, "--max-weight 1000000000.0: from"),
    ],
)
def test_an_invite_that_would_be_of_no_use_is_not_made(
    tmp_path: Path, access: str, terms: dict[str, Any], says: str
) -> None:
    manifest, mine = run_with(access)
    with pytest.raises(CredentialsError, match=says):
        invite(manifest, mine, tmp_path, **terms)


def test_only_admins_invite(tmp_path: Path) -> None:
    manifest, mine = run_with("invite")
    text = invite(manifest, mine, tmp_path)
    learner = credentials_from_invite(decode_invite(text), Identity.ephemeral())
    with pytest.raises(CredentialsError, match="only admins invite"):
        invite(manifest, learner, tmp_path / "learner")
    assert how_to_join(manifest, learner, tmp_path / "learner", None) == []  # type: ignore[arg-type]


def test_who_resumes_a_private_run_of_another_peer_is_told_whose_it_is(tmp_path: Path) -> None:
    """An invite is of no use then: nobody is left who would let anybody in."""
    manifest, mine = run_with("invite")
    left, new = tmp_path / "left", tmp_path / "new"
    Identity.load_or_create(left / "identity.key")
    stranger = Identity.ephemeral()
    run = left / "c0ffee"
    for folders in ([left], [tmp_path, run]):
        with pytest.raises(CredentialsError, match=f"go on as .* p2pdiloco resume {left} --state {left}$"):
            require_membership(manifest, stranger, new, None, folders)
    with pytest.raises(CredentialsError, match=r"p2pdiloco join INVITE$"):
        require_membership(manifest, stranger, new, None, [tmp_path])
    require_membership(manifest, FOUNDER, new, None, [left])
    require_membership(manifest, stranger, new, decode_invite(invite(manifest, mine, tmp_path)), [left])
    require_membership(run_with("open")[0], stranger, new, None, [left])


def test_the_invite_that_is_shown_stays_the_same_while_its_addresses_are_right(tmp_path: Path) -> None:
    manifest, mine = run_with("invite")
    grant = load_grant(manifest, mine, tmp_path, time.time())
    first = load_or_make_invite(manifest, mine, grant, tmp_path, (ADDRESS,))
    assert load_or_make_invite(manifest, mine, grant, tmp_path, (ADDRESS, OTHER)) == first
    moved = load_or_make_invite(manifest, mine, grant, tmp_path, (OTHER, THIRD))
    assert moved != first
    assert decode_invite(moved).initial_peers() == (OTHER, THIRD)
    assert load_or_make_invite(manifest, mine, grant, tmp_path, (OTHER,)) == moved, "other nodes come and go"


def test_later_invites_name_other_nodes_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invitations, "LOOK_S", 0.001)
    manifest, mine = run_with("invite")

    async def story() -> None:
        directory = Places()
        keep_addresses(tmp_path, directory.places)
        said: list[str | StatusMessage] = []
        keeping = asyncio.create_task(
            keep_invite_addresses(manifest, mine, tmp_path, directory, lambda: True, said.append)  # type: ignore[arg-type]
        )
        async with asyncio.timeout(10.0):
            directory.further = (THIRD,)
            await directory.looked_at()
        keeping.cancel()
        assert kept_addresses(tmp_path) == (ADDRESS, THIRD)
        assert said == [], "the user's invite is as good as before"

    asyncio.run(story())


class Known:
    """A directory that has been met."""

    def visible_addresses(self) -> tuple[str, ...]:
        return (ADDRESS,)

    def further_invite_addresses(self) -> tuple[str, ...]:
        return ()

    def invite_addresses(self) -> tuple[str, ...]:
        return (OTHER,)


@pytest.mark.parametrize("kind", ["transformer", "external"])
@pytest.mark.parametrize("access", ["open", "invite", "list"])
def test_what_is_told_to_join_with_can_be_used_as_it_stands(tmp_path: Path, access: str, kind: str) -> None:
    """Of a run of training scripts by a script: ``p2pdiloco join`` has none."""
    manifest, mine = run_with(access)
    config = msgspec.structs.replace(manifest.config, model=ModelConfig(kind=kind))
    manifest = msgspec.structs.replace(manifest, config=config)
    mine = mine._replace(run=manifest.run)
    folder = tmp_path / "a state" / "run"
    told = how_to_join(manifest, mine, folder, Known())  # type: ignore[arg-type]
    words, lines = [one.invite for one in told], list(map(str, told))
    if access == "open":
        assert words == [ADDRESS, OTHER]
    elif access == "invite":
        assert [decode_invite(word).run for word in words] == [manifest.run]
    else:
        assert words == [""], "an admin makes one for each"
    typed = [word or "INVITE" for word in words]
    if kind == "external":
        begins = [f'{INVITED}:  initial_peers=["{word}"]' for word in typed]
    else:
        begins = [f"{INVITED}:  p2pdiloco join {word}" for word in typed]
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True))
    if (access, kind) == ("list", "external"):
        assert lines[0].endswith(f"by p2pdiloco members add --peer ID --run stage --state '{tmp_path}/a state'")


def test_addresses_are_kept_for_invites_that_are_made_later(tmp_path: Path) -> None:
    assert kept_addresses(tmp_path) == ()
    keep_addresses(tmp_path, [ADDRESS, OTHER])
    assert kept_addresses(tmp_path) == (ADDRESS, OTHER)


class Places:
    """What of a directory is asked here."""

    peer_id = OTHER.rpartition("/")[2]

    def __init__(self) -> None:
        self.places = (ADDRESS,)
        self.further: tuple[str, ...] = ()
        self.is_dialable: bool | None = None
        self.looks = asyncio.Semaphore(0)

    def invite_addresses(self) -> tuple[str, ...]:
        self.looks.release()
        return self.places

    def further_invite_addresses(self) -> tuple[str, ...]:
        return self.further

    async def looked_at(self, times: int = 12) -> None:
        """So often more, from now on: what followed all of these but the last is done."""
        while not self.looks.locked():
            await self.looks.acquire()
        for _ in range(times):
            await self.looks.acquire()


@pytest.mark.parametrize("is_dialable", [True, None, False])
def test_where_newcomers_find_the_directory_follows_who_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_dialable: bool | None
) -> None:
    """A bootstrap has gone: an invite that is made now, here or by ``p2pdiloco members add``, names who is there,
    unless nobody can dial that; and comes back."""
    monkeypatch.setattr(invitations, "LOOK_S", 0.001)
    manifest, mine = run_with("invite")
    said: list[str | StatusMessage] = []

    async def story() -> None:
        directory = Places()
        keep_addresses(tmp_path, directory.places)
        keeping = asyncio.create_task(
            keep_invite_addresses(manifest, mine, tmp_path, directory, lambda: is_dialable, said.append)  # type: ignore[arg-type]
        )
        async with asyncio.timeout(10.0):
            await directory.looked_at()
            assert (kept_addresses(tmp_path), said) == ((ADDRESS,), [])
            for _ in range(2):  # it stands still for half a minute
                directory.places = (OTHER,)
                await directory.looked_at(4)
                directory.places = (ADDRESS,)
                await directory.looked_at()
            assert (kept_addresses(tmp_path), said) == ((ADDRESS,), [])
            directory.places = (OTHER,)
            await directory.looked_at()
            assert kept_addresses(tmp_path) == ((OTHER,) if is_dialable is not False else (ADDRESS,))
            directory.places = (ADDRESS,)
            await directory.looked_at()
            assert kept_addresses(tmp_path) == (ADDRESS,)
        keeping.cancel()

    asyncio.run(story())
    assert said.pop() == invitations.AGAIN
    if is_dialable is False:
        assert said == [invitations.NOBODY_COMES]
    else:
        assert said[0] == invitations.MOVED
        assert isinstance(said[1], Invited)
        assert decode_invite(said[1].invite).initial_peers() == (OTHER,)


HERE, THERE = (OTHER,), (ADDRESS,)
MOVED, AGAIN, NOBODY_COMES = (invitations.MOVED, INVITED), (invitations.AGAIN,), (invitations.NOBODY_COMES,)


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(
            [
                (HERE, False, HERE, ()),
                (THERE, False, THERE, MOVED),
                (HERE, False, THERE, NOBODY_COMES),
                (THERE, False, THERE, AGAIN),
            ],
            id="a bootstrap that was silent at the start",
        ),
        pytest.param(
            [
                (THERE, None, THERE, ()),
                (HERE, False, THERE, NOBODY_COMES),
                (HERE, True, HERE, MOVED),
                (HERE, False, HERE, NOBODY_COMES),
                (THERE, False, THERE, AGAIN),
            ],
            id="others find out later whether we can be dialled",
        ),
        pytest.param(
            [((ADDRESS, THIRD), False, (ADDRESS, THIRD), ()), ((THIRD,), False, (THIRD,), MOVED)],
            id="one of two bootstraps goes",
        ),
        pytest.param([(HERE, None, HERE, ()), (HERE, False, HERE, ())], id="there never was another place"),
    ],
)
def test_where_newcomers_are_sent_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: list[tuple[Any, ...]]
) -> None:
    """Places that answer, whether others could dial ours, what is kept for invites then, how what is said begins."""
    monkeypatch.setattr(invitations, "LOOK_S", 0.001)
    manifest, mine = run_with("invite")
    said: list[str | StatusMessage] = []

    async def tell() -> None:
        directory = Places()
        directory.places = story[0][0]
        keep_addresses(tmp_path, directory.places)
        keeping = asyncio.create_task(
            keep_invite_addresses(manifest, mine, tmp_path, directory, lambda: directory.is_dialable, said.append)  # type: ignore[arg-type]
        )
        async with asyncio.timeout(10.0):
            for directory.places, directory.is_dialable, kept, begins in story:
                said.clear()
                await directory.looked_at()
                assert kept_addresses(tmp_path) == kept
                assert all(str(line).startswith(begin) for line, begin in zip(said, begins, strict=True)), said
        keeping.cancel()

    asyncio.run(tell())


def test_a_full_disk_takes_no_addresses_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invitations, "LOOK_S", 0.001)
    manifest, mine = run_with("invite")

    async def tell() -> None:
        directory = Places()
        keep_addresses(tmp_path, directory.places)
        keeping = asyncio.create_task(
            keep_invite_addresses(manifest, mine, tmp_path, directory, lambda: True, None)  # type: ignore[arg-type]
        )
        async with asyncio.timeout(10.0):
            await directory.looked_at()
            directory.places = HERE
            with full_disk():
                await directory.looked_at()
            assert kept_addresses(tmp_path) == THERE
            await directory.looked_at()
            assert kept_addresses(tmp_path) == HERE, "once there is room"
        keeping.cancel()

    asyncio.run(tell())


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Files of this process grow no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_who_made_an_invite_comes_back_by_it_as_what_it_is(tmp_path: Path) -> None:
    """After all machines died the founder types what the others type. Before, it was certified twice, and for good."""
    manifest, mine = run_with("invite")
    folder = folder_of(tmp_path / "founder", manifest.run)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_bytes(manifest.encode())
    own = decode_invite(invite(manifest, mine, folder))
    twice = credentials_from_invite(own, FOUNDER).chain
    MemberFiles(folder).write_chain(twice)  # what an earlier release has left
    for found in (
        credentials_for_joining(own, FOUNDER, tmp_path / "founder"),
        credentials_of(manifest, FOUNDER, folder),
    ):
        assert (found.chain, found.identity) == (b"", FOUNDER)
        assert load_grant(manifest, found, folder, time.time()).role is Role.ADMIN
    admin = Identity.ephemeral()
    text = invite(manifest, mine, folder, role=Role.ADMIN)
    place = folder_of(tmp_path / "admin", manifest.run)
    place.mkdir(parents=True)
    (place / MANIFEST).write_bytes(manifest.encode())
    theirs = credentials_for_joining(decode_invite(text), admin, tmp_path / "admin")
    MemberFiles(place).write_chain(theirs.chain)
    back = credentials_for_joining(decode_invite(invite(manifest, theirs, place)), admin, tmp_path / "admin")
    assert back.chain == theirs.chain
    other = credentials_for_joining(own, admin, tmp_path / "nobody")
    assert load_grant(manifest, other, place, time.time()).role is Role.LEARNER


def test_who_has_no_certificate_is_told_what_to_do(tmp_path: Path) -> None:
    manifest, _ = run_with("invite")
    with pytest.raises(CredentialsError, match="join once with an invite"):
        credentials_of(manifest, Identity.ephemeral(), tmp_path)
    assert credentials_of(manifest, FOUNDER, tmp_path).chain == b""


def test_a_followers_invite_makes_a_follower_and_a_cap_bounds_the_weight(tmp_path: Path) -> None:
    manifest, mine = run_with("invite")
    said: list[str] = []
    for number, (role, cap) in enumerate([(Role.FOLLOWER, None), (Role.LEARNER, 0.5)]):
        text = invite(manifest, mine, tmp_path, role=role, max_weight=cap, not_after=NEVER)
        holder = credentials_from_invite(decode_invite(text), Identity.ephemeral())
        options = apply_grant(manifest, holder, options_of(tmp_path / str(number)), said.append)
        assert options.is_follower is (role is Role.FOLLOWER)
        assert options.link.weight == (1.0 if cap is None else cap)
    assert len(said) == 1
    assert "without training" in said[0]
