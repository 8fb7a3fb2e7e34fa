"""Bugs of membership: certificates, bans, invites, the greeting (``planted`` tells how they are used)."""

from __future__ import annotations

from p2pdiloco.simulation.planter import Bug

_CERTIFICATES = "p2pdiloco.wire.certificates"
_STATEMENTS = "p2pdiloco.wire.statements"
_MEMBERS = "p2pdiloco.wire.members"
_INVITES = "p2pdiloco.wire.invites"
_HANDSHAKE = "p2pdiloco.net.handshake"
_CONNECTION = "p2pdiloco.net.connection"

_TESTS = "tests/unit/test_wire_members.py"
_PEER = "p2pdiloco.peer.peer"
_STANDING_TESTS = "tests/unit/test_peer_standing.py"
_FELLOWSHIP = "p2pdiloco.node.fellowship"
_FELLOWSHIP_TESTS = "tests/unit/test_node_fellowship.py"
_INVITE_TESTS = "tests/unit/test_wire_invites.py"
_DOORS_TESTS = "tests/unit/test_net_doors.py"

BUGS = (
    Bug(
        name="text far behind an invite is ignored",
        module=_INVITES,
        old='    text = "".join(text.split())\n',
        new='    text = "".join(text[:500].split())\n',
        harm="a command behind 500 spaces is taken for a part of the invite, wherever its text goes on to",
        killed_by=(f"{_INVITE_TESTS}::test_what_stands_beside_an_invite_is_an_error_however_far_away",),
    ),
    Bug(
        name="an invite is written into a script as it was typed",
        module="p2pdiloco.cli.launch",
        old="invite=shlex.quote(invite)",
        new="invite=arguments.invite",
        harm="whoever sends an invite with a line break in it writes lines of the script that rented machines run",
        killed_by=("tests/unit/test_cli_launch.py::test_what_stands_behind_an_invite_reaches_no_machine",),
    ),
    Bug(
        name="a restart forgets who may own nothing",
        module="p2pdiloco.peer.own_commits",
        old="        if known == self._convictions:\n            return\n",
        new="        return\n",
        harm="who is killed and comes back gives to an owner that all have barred, alone if it is alone",
        killed_by=("tests/unit/test_peer_own_commits.py::test_a_restart_forgets_no_ban_that_is_running",),
    ),
    Bug(
        name="proofs of earlier lives are believed as they lie there",
        module="p2pdiloco.peer.driver",
        old="check_equivocation(proof, OPEN)",
        new="pass",
        harm="a spoilt file bars an honest owner",
        killed_by=("tests/unit/test_peer_own_commits.py::test_a_restart_forgets_no_ban_that_is_running",),
    ),
    Bug(
        name="malformed statements cost nothing",
        module=_FELLOWSHIP,
        old="""            self.links.blame(peer)
            raise RequestRefused(str(error)) from error
""",
        new="""            raise RequestRefused(str(error)) from error
""",
        harm="a member has others look at signatures for as long as it likes",
        killed_by=(f"{_FELLOWSHIP_TESTS}::test_malformed_statements_cost_their_sender",),
    ),
    # -- what members sign ---------------------------------------------------------------------------------------------
    Bug(
        name="givers in a commit need not be members",
        module="p2pdiloco.peer.signatures",
        old="if not register.was_member(giver):",
        new="if False:",
        harm="an owner fills its commit with learners that it made up",
        killed_by=("tests/unit/protocol/test_signatures.py::test_owner_and_givers_are_members",),
    ),
    Bug(
        name="owners need not be members",
        module="p2pdiloco.peer.signatures",
        old="if not register.was_member(header.owner):",
        new="if False:",
        harm="a lineage of commits by keys that nobody let in",
        killed_by=("tests/unit/protocol/test_signatures.py::test_owner_and_givers_are_members",),
    ),
    Bug(
        name="followers merged by an owner that likes them",
        module="p2pdiloco.peer.signatures",
        old="if not register.may_contribute(giver):",
        new="if False:",
        harm="what a founder granted for following teaches the model",
        killed_by=("tests/unit/protocol/test_signatures.py::test_owner_and_givers_are_members",),
    ),
    Bug(
        name="who is not known is not asked for",
        module="p2pdiloco.peer.inspection",
        old="if isinstance(error, UnknownMemberError) and not was_asked:",
        new="if False:",
        harm="the first commits with a newcomer are dropped by all who have not met it",
        killed_by=(f"{_STANDING_TESTS}::test_a_commit_waits_until_its_sender_was_asked_whom_it_names",),
    ),
    Bug(
        name="a node's register is not asked",
        module="p2pdiloco.peer.driver",
        old="Cargo(state.layout, identity, machine.view.run, standing, store)",
        new="Cargo(state.layout, identity, machine.view.run, store=store)",
        harm="an owner fills its commit with learners that it made up",
        killed_by=(f"{_STANDING_TESTS}::test_a_commit_of_who_is_no_member_is_dropped_by_a_peer",),
    ),
    Bug(
        name="makers of a state need not be members",
        module="p2pdiloco.peer.downloads",
        old="checked_offer(self._manifest, self._layout, shard, body, self._inspection.standing)",
        new="checked_offer(self._manifest, self._layout, shard, body)",
        harm="a newcomer takes a chain of keys that nobody let in",
        killed_by=(f"{_STANDING_TESTS}::test_a_state_is_taken_when_its_donor_has_told_who_made_it",),
    ),
    # -- certificates --------------------------------------------------------------------------------------------------
    Bug(
        name="certificate's signature not verified",
        module=_CERTIFICATES,
        old="if not verify(grant.subject, signed_bytes(run, grant.subject, certificate), certificate.signature):",
        new="if False:",
        harm="anybody writes a certificate for itself",
        killed_by=(f"{_TESTS}::test_every_changed_bit_of_a_chain_is_noticed",),
    ),
    Bug(
        name="run not under the certificate's signature",
        module=_CERTIFICATES,
        old='return CONTEXT + run.encode() + b"\\x00" + key_of(signer)',
        new='return CONTEXT + b"\\x00" + key_of(signer)',
        harm="an invite to one run of a founder opens all of them",
        killed_by=(f"{_TESTS}::test_a_certificate_for_another_run_is_refused",),
    ),
    Bug(
        name="everybody may sign everything",
        module=_CERTIFICATES,
        old="if not may_sign(grant, certificate):",
        new="if False:",
        harm="a learner makes itself an admin",
        killed_by=(
            f"{_TESTS}::test_who_may_sign_what",
            f"{_TESTS}::test_nothing_is_granted_that_was_not_granted_before",
        ),
    ),
    Bug(
        name="an invite signs invites",
        module=_CERTIFICATES,
        old="return certificate.kind is Kind.PEER and certificate.role <= signer.role",
        new="return certificate.role <= signer.role",
        harm="a leaked invite breeds others, each with its own number of peers",
        killed_by=(f"{_TESTS}::test_who_may_sign_what",),
    ),
    Bug(
        name="a chain's end prolonged",
        module=_CERTIFICATES,
        old="not_after=min(grant.not_after, certificate.not_after),",
        new="not_after=certificate.not_after,",
        harm="whoever holds an invite lets it last for ever",
        killed_by=(f"{_TESTS}::test_nothing_is_granted_that_was_not_granted_before",),
    ),
    Bug(
        name="a chain's cap raised",
        module=_CERTIFICATES,
        old="cap=min(grant.cap, certificate.cap),",
        new="cap=certificate.cap,",
        harm="whoever holds an invite owns as much as it likes",
        killed_by=(f"{_TESTS}::test_nothing_is_granted_that_was_not_granted_before",),
    ),
    Bug(
        name="chains of any depth",
        module=_CERTIFICATES,
        old="if anchor.depth + len(certificates) > DEPTH_LIMIT:",
        new="if False:",
        harm="chains grow with each that begins at a known admin",
        killed_by=(f"{_TESTS}::test_a_chain_is_of_bounded_depth_and_goes_in_no_circle",),
    ),
    # -- members -------------------------------------------------------------------------------------------------------
    Bug(
        name="another's certificate taken",
        module=_MEMBERS,
        old="if grant.subject != peer or grant.kind is not Kind.PEER:",
        new="if grant.kind is not Kind.PEER:",
        harm="whoever has seen a member's certificate is that member",
        killed_by=(f"{_TESTS}::test_the_certificate_of_another_key_is_refused",),
    ),
    Bug(
        name="an invite taken for a peer",
        module=_MEMBERS,
        old="if grant.subject != peer or grant.kind is not Kind.PEER:",
        new="if grant.subject != peer:",
        harm="all who hold an invite are one peer, and nobody counts them",
        killed_by=(f"{_TESTS}::test_an_invite_is_no_peer",),
    ),
    Bug(
        name="expiry not looked at",
        module=_MEMBERS,
        old="if grant.not_after != NEVER and now_s > grant.not_after:",
        new="if False:",
        harm="an invite for a day is one for ever",
        killed_by=(f"{_TESTS}::test_an_expired_membership_ends_at_its_second",),
    ),
    Bug(
        name="only the peer's own key looked up among the banned",
        module=_MEMBERS,
        old="        for step in grant.path:\n            for ban in",
        new="        for step in grant.path[-1:]:\n            for ban in",
        harm="whoever holds a revoked invite comes back with another key",
        killed_by=(f"{_TESTS}::test_revoking_an_invite_revokes_what_came_from_it",),
    ),
    Bug(
        name="every admin bans every admin",
        module=_MEMBERS,
        old="return target.role is not Role.ADMIN or by.depth < target.depth",
        new="return True",
        harm="an admin gone bad ends those who appointed it",
        killed_by=(f"{_TESTS}::test_who_bans_whom_does_not_depend_on_the_order",),
    ),
    Bug(
        name="bans by the banned count",
        module=_MEMBERS,
        old="if self._may_ban(ban.by, step) and self.ban_of(ban.by) is None:",
        new="if self._may_ban(ban.by, step):",
        harm="what an admin gone bad did cannot be undone",
        killed_by=(f"{_TESTS}::test_the_founder_ends_what_a_rogue_admin_did",),
    ),
    Bug(
        name="invites count in a list",
        module=_MEMBERS,
        old='if self.access == "list" and any(',
        new="if False and any(",
        harm="whoever holds an invite is on the list",
        killed_by=(f"{_TESTS}::test_in_a_list_only_who_was_certified_by_name_is_let_in",),
    ),
    Bug(
        name="an invite brings any number of peers",
        module=_MEMBERS,
        old="if inviter.kind is Kind.INVITE and self._invited[inviter.subject] >= INVITED_LIMIT:",
        new="if False:",
        harm="whoever holds an invite is a majority",
        killed_by=(f"{_TESTS}::test_an_invite_brings_so_many_peers",),
    ),
    Bug(
        name="everybody may ban",
        module=_STATEMENTS,
        old="if by.subject != signer or by.kind is not Kind.PEER or by.role is not Role.ADMIN:",
        new="if by.subject != signer:",
        harm="one member ends the membership of all others",
        killed_by=(f"{_TESTS}::test_only_admins_ban_and_the_ban_names_run_signer_and_subject",),
    ),
    Bug(
        name="ban's signature not verified",
        module=_STATEMENTS,
        old="if not verify(signer, _banned_bytes(run, signer, subject), data[KEY_BYTES:signer_at]):",
        new="if False:",
        harm="one member ends the membership of all others",
        killed_by=(f"{_TESTS}::test_only_admins_ban_and_the_ban_names_run_signer_and_subject",),
    ),
    # -- the greeting --------------------------------------------------------------------------------------------------
    Bug(
        name="nobody asked for a certificate",
        module=_HANDSHAKE,
        old="            self._door.admit(peer, chain)\n",
        new="            pass\n",
        harm="whoever knows the run's id is a member",
        killed_by=(
            f"{_DOORS_TESTS}::test_who_knows_the_run_and_has_no_certificate_is_refused",
            f"{_DOORS_TESTS}::test_the_revoked_and_the_banned_are_refused",
            f"{_DOORS_TESTS}::test_an_open_run_refuses_whom_its_founder_has_banned",
        ),
    ),
    Bug(
        name="the tag not looked at",
        module=_HANDSHAKE,
        old="if remote.tag != tag_of(self._run, self._role.other, self._fingerprint, remote.nonce):",
        new="if False:",
        harm="strangers are shown certificates, and told of more than an invite",
        killed_by=(
            f"{_DOORS_TESTS}::test_a_stranger_is_told_to_ask_for_an_invite_and_nothing_else",
            f"{_DOORS_TESTS}::test_who_dials_a_stranger_shows_it_nothing",
        ),
    ),
    Bug(
        name="a private run named in the greeting",
        module=_HANDSHAKE,
        old='run="" if is_private else self.run,',
        new="run=self.run,",
        harm="whoever dials a peer learns the run's id, by which its peers are found",
        killed_by=(f"{_DOORS_TESTS}::test_a_stranger_is_told_to_ask_for_an_invite_and_nothing_else",),
    ),
    Bug(
        name="the tag not bound to its channel",
        module=_HANDSHAKE,
        old="digest_of(TAG_CONTEXT, role.value, fingerprint, nonce, run.encode())",
        new="digest_of(TAG_CONTEXT, role.value, nonce, run.encode())",
        harm="a tag that was seen opens other members' mouths",
        killed_by=(f"{_DOORS_TESTS}::test_a_man_in_the_middle_with_a_certificate_of_his_own_reads_nothing",),
    ),
    Bug(
        name="the listener proves itself first",
        module=_CONNECTION,
        old="                if self.role is Role.DIALLER:\n",
        new="                if True:\n",
        harm="who knows the run's id is shown its members' certificates, and takes a refusal for a connection",
        killed_by=(f"{_DOORS_TESTS}::test_a_certificate_that_does_not_hold_is_refused_at_both_ends",),
    ),
    # -- at a peer -----------------------------------------------------------------------------------------------------
    Bug(
        name="a follower's contribution taken",
        module=_PEER,
        old="case msg.Contribution() if not standing.may_contribute(peer_of(message.contributor.learner)):",
        new="case msg.Contribution() if False:",
        harm="an invite to look on is one to train",
        killed_by=(f"{_STANDING_TESTS}::test_what_a_follower_contributes_is_not_taken",),
    ),
    Bug(
        name="a certificate's weight not looked at",
        module=_PEER,
        old="weight = min(message.weight, standing.most_weight(peer))",
        new="weight = message.weight",
        harm="whoever has an invite owns as much as it likes",
        killed_by=(f"{_STANDING_TESTS}::test_a_weight_counts_for_what_the_certificate_says",),
    ),
    Bug(
        name="an observer taken for a peer",
        module=_PEER,
        old="if not is_observer and not self.inspection.standing.observes(peer):",
        new="if not is_observer:",
        harm="who may ask for the status takes turns, too",
        killed_by=(f"{_STANDING_TESTS}::test_who_observes_is_no_peer",),
    ),
    # -- at a node -----------------------------------------------------------------------------------------------------
    Bug(
        name="news of members not passed on",
        module=_FELLOWSHIP,
        old="            self._spread(await self._learned(split_statements(request.statements), peer), but=peer)\n",
        new="            await self._learned(split_statements(request.statements), peer)\n",
        harm="a ban ends with the founder's own connections",
        killed_by=(f"{_FELLOWSHIP_TESTS}::test_a_ban_reaches_everybody_and_ends_connections",),
    ),
    Bug(
        name="who connects is not asked for members",
        module=_FELLOWSHIP,
        old='        self._spawn(self.ask(peer), name=f"ask {peer} for members")\n',
        new="",
        harm="a newcomer lets in who was banned before it came",
        killed_by=(f"{_FELLOWSHIP_TESTS}::test_who_connects_learns_of_all_members_and_bans",),
    ),
    Bug(
        name="who is banned goes on alone",
        module=_FELLOWSHIP,
        old="                    self._expelled(str(error))\n",
        new="",
        harm="who was banned trains for days on a model of its own, and is told nothing",
        killed_by=(f"{_FELLOWSHIP_TESTS}::test_a_ban_reaches_everybody_and_ends_connections",),
    ),
    Bug(
        name="who is no member any more stays connected",
        module=_FELLOWSHIP,
        old="                self.links.disconnect(peer, str(error))\n",
        new="                pass\n",
        harm="a ban counts from the next start on",
        killed_by=(
            f"{_FELLOWSHIP_TESTS}::test_a_ban_reaches_everybody_and_ends_connections",
            f"{_FELLOWSHIP_TESTS}::test_who_expires_is_parted_from",
        ),
    ),
    Bug(
        name="observers told of members",
        module=_FELLOWSHIP,
        old="        if self.observes(peer):\n            raise",
        new="        if False:\n            raise",
        harm="whoever may ask for the status fills everybody's memory with members",
        killed_by=(f"{_FELLOWSHIP_TESTS}::test_observers_are_told_nothing_of_members_and_are_not_believed",),
    ),
    Bug(
        name="followers contribute",
        module=_FELLOWSHIP,
        old="return self.members.role_of(peer) >= Role.LEARNER",
        new="return True",
        harm="an invite to look on is one to train",
        killed_by=(f"{_FELLOWSHIP_TESTS}::test_a_follower_gives_nothing_and_owns_nothing",),
    ),
    # -- invites -------------------------------------------------------------------------------------------------------
    Bug(
        name="an invite's checksum not compared",
        module=_INVITES,
        old="if checksum != _checksum(body):",
        new="if False:",
        harm="a typo is told as a refusal by nobody in particular, much later",
        killed_by=(f"{_INVITE_TESTS}::test_every_typo_is_told_as_one",),
    ),
    Bug(
        name="an invite's names not looked at",
        module=_INVITES,
        old="            _packed_address(address)  # which complains of a name that is none\n",
        new="            pass\n",
        harm="an invite names a machine with a slash, and means something else once it is written as an address",
        killed_by=(f"{_INVITE_TESTS}::test_whoever_makes_the_checksum_right_gets_no_further",),
    ),
)
