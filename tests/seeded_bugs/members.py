"""Bugs of membership: certificates, bans, invites, the greeting (``planted`` tells how they are used)."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_CERTIFICATES = "p2pdiloco.access.certificates"
_STATEMENTS = "p2pdiloco.access.membership_log"
_MEMBERS = "p2pdiloco.access.members"
_INVITES = "p2pdiloco.access.invite_code"
_HANDSHAKE = "p2pdiloco.net.handshake"

_TESTS = "tests/unit/test_access_members.py"
_PEER = "p2pdiloco.peer.peer"
_STANDING_TESTS = "tests/unit/test_peer_signatures.py"
_FELLOWSHIP = "p2pdiloco.swarm.membership_sync"
_FELLOWSHIP_TESTS = "tests/unit/test_swarm_membership_sync.py"
_INVITE_TESTS = "tests/unit/test_access_invite_code.py"
_DOORS_TESTS = "tests/unit/test_net_authorization.py"

BUGS = (
    Bug(
        name="text far behind an invite is ignored",
        module=_INVITES,
        where="decode_invite",
        old="text.split",
        new="text[:500].split",
        harm="a command behind 500 spaces is taken for a part of the invite, wherever its text goes on to",
        killed_by=(f"{_INVITE_TESTS}::test_what_stands_beside_an_invite_is_an_error_however_far_away",),
    ),
    Bug(
        name="an invite is written into a script as it was typed",
        module="p2pdiloco.cli.launch",
        where="task(arguments)",
        old="shlex.quote(invite)",
        new="arguments.invite",
        harm="whoever sends an invite with a line break in it writes lines of the script that rented machines run",
        killed_by=("tests/unit/test_cli_launch.py::test_what_stands_behind_an_invite_reaches_no_machine",),
    ),
    Bug(
        name="a restart forgets who may own nothing",
        module="p2pdiloco.peer.convictions",
        where="ConvictionFile.save",
        old="if known == self._saved:\n    return",
        new="return",
        harm="who is killed and comes back gives to an owner that all have barred, alone if it is alone",
        killed_by=("tests/unit/test_peer_convictions.py::test_a_restart_forgets_no_ban_that_is_running",),
    ),
    Bug(
        name="proofs of earlier lives are believed as they lie there",
        module="p2pdiloco.peer.convictions",
        where="ConvictionFile.load",
        old="check_equivocation(proof, OPEN)",
        new="pass",
        harm="a spoilt file bars an honest owner",
        killed_by=("tests/unit/test_peer_convictions.py::test_a_restart_forgets_no_ban_that_is_running",),
    ),
    # -- what members sign ---------------------------------------------------------------------------------------------
    Bug(
        name="givers in a commit need not be members",
        module="p2pdiloco.peer.signatures",
        where="check_contributor",
        old="not register.was_member(giver)",
        new="False",
        harm="an owner fills its commit with learners that it made up",
        killed_by=("tests/unit/protocol/test_signatures.py::test_owner_and_givers_are_members",),
    ),
    Bug(
        name="owners need not be members",
        module="p2pdiloco.peer.signatures",
        where="check_commit",
        old="not register.was_member(header.owner)",
        new="False",
        harm="a lineage of commits by keys that nobody let in",
        killed_by=("tests/unit/protocol/test_signatures.py::test_owner_and_givers_are_members",),
    ),
    Bug(
        name="followers merged by an owner that likes them",
        module="p2pdiloco.peer.signatures",
        where="check_contributor",
        old="not register.may_contribute(giver)",
        new="False",
        harm="what a founder granted for following teaches the model",
        killed_by=("tests/unit/protocol/test_signatures.py::test_owner_and_givers_are_members",),
    ),
    Bug(
        name="who is not known is not asked for",
        module="p2pdiloco.peer.message_verifier",
        where="MessageVerifier._verify.checked",
        old="isinstance(error, UnknownMemberError) and (not was_asked)",
        new="False",
        harm="the first commits with a newcomer are dropped by all who have not met it",
        killed_by=(f"{_STANDING_TESTS}::test_a_commit_waits_until_its_sender_was_asked_whom_it_names",),
    ),
    Bug(
        name="a node's register is not asked",
        module="p2pdiloco.peer.peer",
        where="Peer.__init__",
        old="PayloadCache(layout, identity, manifest.run, standing, store)",
        new="PayloadCache(layout, identity, manifest.run, store=store)",
        harm="an owner fills its commit with learners that it made up",
        killed_by=(f"{_STANDING_TESTS}::test_a_commit_of_who_is_no_member_is_dropped_by_a_peer",),
    ),
    Bug(
        name="makers of a state need not be members",
        module="p2pdiloco.peer.state_client",
        where="StateClient._check_offer.check",
        old="checked_offer(self._manifest, self._layout, shard, body, self._verifier.standing)",
        new="checked_offer(self._manifest, self._layout, shard, body)",
        harm="a newcomer takes a chain of keys that nobody let in",
        killed_by=(f"{_STANDING_TESTS}::test_a_state_is_taken_when_its_donor_has_told_who_made_it",),
    ),
    # -- certificates --------------------------------------------------------------------------------------------------
    Bug(
        name="run not under the certificate's signature",
        module=_CERTIFICATES,
        where="signed_bytes",
        old="CONTEXT + run.encode()",
        new="CONTEXT",
        harm="an invite to one run of a founder opens all of them",
        killed_by=(f"{_TESTS}::test_a_certificate_for_another_run_is_refused",),
    ),
    Bug(
        name="a chain's end prolonged",
        module=_CERTIFICATES,
        where="follow",
        old="min(grant.not_after, certificate.not_after)",
        new="certificate.not_after",
        harm="whoever holds an invite lets it last for ever",
        killed_by=(f"{_TESTS}::test_nothing_is_granted_that_was_not_granted_before",),
    ),
    Bug(
        name="a chain's cap raised",
        module=_CERTIFICATES,
        where="follow",
        old="min(grant.cap, certificate.cap)",
        new="certificate.cap",
        harm="whoever holds an invite owns as much as it likes",
        killed_by=(f"{_TESTS}::test_nothing_is_granted_that_was_not_granted_before",),
    ),
    # -- members -------------------------------------------------------------------------------------------------------
    Bug(
        name="only the peer's own key looked up among the banned",
        module=_MEMBERS,
        where="Members.ban_of",
        old="zip(grant.path, (*grant.path[1:], None), strict=True)",
        new="[(grant, None)]",
        harm="whoever holds a revoked invite comes back with another key",
        killed_by=(f"{_TESTS}::test_revoking_an_invite_revokes_what_came_from_it",),
    ),
    Bug(
        name="every admin bans every admin",
        module=_MEMBERS,
        where="Members.may_ban",
        old="target.role is not Role.ADMIN or by.depth < target.depth",
        new="True",
        harm="an admin gone bad ends those who appointed it",
        killed_by=(f"{_TESTS}::test_who_bans_whom_does_not_depend_on_the_order",),
    ),
    Bug(
        name="invites count in a list",
        module=_MEMBERS,
        where="Members._granted",
        old="self.access == 'list'",
        new="False",
        harm="whoever holds an invite is on the list",
        killed_by=(f"{_TESTS}::test_in_a_list_only_who_was_certified_by_name_is_let_in",),
    ),
    Bug(
        name="everybody may ban",
        module=_STATEMENTS,
        where="_admin",
        old="by.subject != signer or by.kind is not Kind.PEER or by.role is not Role.ADMIN",
        new="by.subject != signer",
        harm="one member ends the membership of all others",
        killed_by=(f"{_TESTS}::test_only_admins_ban_and_the_ban_names_run_signer_and_subject",),
    ),
    Bug(
        name="a closed invite keeps nobody",
        module=_MEMBERS,
        where="Members.ban_of",
        old="guest is not None and ban.keeps(guest.subject)",
        new="False",
        harm="to ban one peer ends the membership of all who came by the same invite",
        killed_by=(f"{_TESTS}::test_a_closed_invite_keeps_who_is_in_and_lets_in_nobody_new",),
    ),
    Bug(
        name="made-up introductions use up an invite",
        module=_MEMBERS,
        where="Members._introduce",
        old="teller is not None and inviter.kind is Kind.INVITE",
        new="False",
        harm="one peer tells of 256 keys that nobody holds, and no newcomer gets in any more",
        killed_by=(f"{_TESTS}::test_made_up_introductions_use_up_no_invite",),
    ),
    Bug(
        name="the first told goes, whoever told it",
        module=_MEMBERS,
        where="Members._displaced_by",
        old="next((self._known[peer] for peer, by in told.items() if by == most), grant)",
        new="self._known[next(iter(told))]",
        harm="one peer's made-up introductions have others forget those that are real",
        killed_by=(f"{_TESTS}::test_who_makes_up_introductions_displaces_its_own",),
    ),
    Bug(
        name="others' word goes before a peer's own chain",
        module=_MEMBERS,
        where="Members._rank",
        old="not is_unseen",
        new="True",
        harm="who holds an invite certifies everybody's key with it, and when it is revoked all are out",
        killed_by=(f"{_TESTS}::test_nobodys_word_takes_a_chain_from_a_peer_that_was_here",),
    ),
    Bug(
        name="records of the directory use up an invite",
        module=_FELLOWSHIP,
        where="MembershipSync.is_announced_by_member",
        old="self.members.examine(peer, chain, self._now_s())",
        new="self.door.admit(peer, chain)",
        harm="one machine publishes 256 records, and no newcomer gets in any more",
        killed_by=(f"{_FELLOWSHIP_TESTS}::test_records_of_the_directory_use_up_no_invite",),
    ),
    Bug(
        name="introductions are looked at without end",
        module=_FELLOWSHIP,
        where="MembershipSync._may_tell",
        old="self._introduced.take(teller, self._now_s())",
        new="True",
        harm="one peer has others look at signatures for as long as it likes",
        killed_by=(f"{_FELLOWSHIP_TESTS}::test_made_up_introductions_are_bounded_and_keep_nobody_out",),
    ),
    # -- the greeting --------------------------------------------------------------------------------------------------
    Bug(
        name="a private run named in the greeting",
        module=_HANDSHAKE,
        where="Greeter.handshake",
        old="'' if is_private else self.run",
        new="self.run",
        harm="whoever dials a peer learns the run's id, by which its peers are found",
        killed_by=(f"{_DOORS_TESTS}::test_a_stranger_is_told_to_ask_for_an_invite_and_nothing_else",),
    ),
    Bug(
        name="the tag not bound to its channel",
        module=_HANDSHAKE,
        where="tag_of",
        old="digest_of(TAG_CONTEXT, role.value, fingerprint, nonce, run.encode())",
        new="digest_of(TAG_CONTEXT, role.value, nonce, run.encode())",
        harm="a tag that was seen opens other members' mouths",
        killed_by=(f"{_DOORS_TESTS}::test_a_man_in_the_middle_with_a_certificate_of_his_own_reads_nothing",),
    ),
    # -- at a peer -----------------------------------------------------------------------------------------------------
    Bug(
        name="a follower's contribution taken",
        module=_PEER,
        where="Peer.message",
        old="not standing.may_contribute(peer_of(message.contributor.learner))",
        new="False",
        harm="an invite to look on is one to train",
        killed_by=(f"{_STANDING_TESTS}::test_what_a_follower_contributes_is_not_taken",),
    ),
    Bug(
        name="a certificate's weight not looked at",
        module=_PEER,
        where="Peer.message",
        old="min(message.weight, standing.most_weight(peer))",
        new="message.weight",
        harm="whoever has an invite owns as much as it likes",
        killed_by=(f"{_STANDING_TESTS}::test_a_weight_counts_for_what_the_certificate_says",),
    ),
    Bug(
        name="an observer taken for a peer",
        module=_PEER,
        where="Peer.connected",
        old="not is_observer and (not self.verifier.standing.observes(peer))",
        new="not is_observer",
        harm="who may ask for the status takes turns, too",
        killed_by=(f"{_STANDING_TESTS}::test_who_observes_is_no_peer",),
    ),
    # -- at a node -----------------------------------------------------------------------------------------------------
    Bug(
        name="news of members not passed on",
        module=_FELLOWSHIP,
        where="MembershipSync.answer",
        old="self._spread_and_part(await self._learn(split_statements(request.statements), peer), but=peer)",
        new="await self._learn(split_statements(request.statements), peer)",
        harm="a ban ends with the founder's own connections",
        killed_by=(f"{_FELLOWSHIP_TESTS}::test_a_ban_reaches_everybody_and_ends_connections",),
    ),
    Bug(
        name="followers contribute",
        module=_FELLOWSHIP,
        where="MembershipSync.may_contribute",
        old="self.members.role_of(peer) >= Role.LEARNER",
        new="True",
        harm="an invite to look on is one to train",
        killed_by=(f"{_FELLOWSHIP_TESTS}::test_a_follower_gives_nothing_and_owns_nothing",),
    ),
    # -- invites -------------------------------------------------------------------------------------------------------
)
