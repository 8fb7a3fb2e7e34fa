"""Bugs of a learner's link and of a script's node; see ``planted``."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_LINK = "p2pdiloco.training.node_link"

_SIDE = "p2pdiloco.training.cuda_copies"
_SIDE_TESTS = "tests/unit/test_training_cuda_copies.py"
_LINK_TESTS = "tests/unit/test_training_node_link.py"
_ADOPTED = "test_a_learner_that_is_adopted_keeps_its_progress_since_the_loss_and_counts_nothing_twice"
_CONSERVATION = "tests/property/test_conservation.py::test_every_token_trained_stands_in_the_parameters_once"
_QUEUE = "tests/unit/test_util_executor.py"


BUGS = (
    # -- copies from and to a device -----------------------------------------------------------------------------------
    Bug(
        name="parameters travel without having been cloned",
        module=_SIDE,
        where="CudaCopies.to_host",
        old="view.to(torch.float32, copy=True)",
        new="view.to(torch.float32)",
        harm="a snapshot holds parts of steps that came after it",
        killed_by=(f"{_SIDE_TESTS}::test_what_reaches_the_host_is_what_the_parameters_were",),
    ),
    # -- the learner's link --------------------------------------------------------------------------------------------
    Bug(
        name="an adopted learner's old tokens counted again",
        module=_LINK,
        where="NodeLink._lost_node",
        old="self.counts.steps = self.counts.tokens = 0",
        new="self.counts.steps = self.counts.steps",
        harm="tokens that the last node merged, or that are gone, are claimed once more",
        killed_by=(f"{_LINK_TESTS}::{_ADOPTED}",),
    ),
    Bug(
        name="an adopted learner has paused before it is asked",
        module=_LINK,
        where="NodeLink._stop",
        old="not self.is_alone",
        new="True",
        harm="a node that comes back to an older state takes the run for complete, and leaves what is trained next",
        killed_by=(f"{_LINK_TESTS}::test_who_reached_the_runs_end_alone_trains_on_where_its_nodes_next_life_says",),
    ),
    Bug(
        name="an adopted learner's progress thrown away",
        module=_LINK,
        where="NodeLink._copy",
        old="self._anchor is not None",
        new="False and self._anchor is not None",
        harm="what was trained without a node is claimed, and is not there",
        killed_by=(f"{_LINK_TESTS}::{_ADOPTED}",),
    ),
    Bug(
        name="answers to the last node go to the next",
        module=_LINK,
        where="NodeLink._lost_node",
        old="self._answers.clear",
        new="self._answers.copy",
        harm="a snapshot that was never asked for is encoded from an empty buffer",
        killed_by=(f"{_LINK_TESTS}::{_ADOPTED}",),
    ),
    Bug(
        name="a replacement is added",
        module=_LINK,
        where="NodeLink._apply",
        old="self._flat.copy_from if replace else self._flat.add_from",
        new="self._flat.add_from",
        harm="a learner that is reset doubles its parameters",
        killed_by=(f"{_LINK_TESTS}::test_a_replacement_takes_the_place_of_what_was_trained", _CONSERVATION),
    ),
    Bug(
        name="what the socket did not take is dropped",
        module="p2pdiloco.training.ipc_channel",
        where="Channel._send",
        old="del self._outgoing[:sent]",
        new="self._outgoing.clear()",
        harm="a busy node gets half a message, and loses its learner",
        killed_by=(f"{_LINK_TESTS}::test_answers_that_do_not_fit_into_the_socket_come_later_and_whole",),
    ),
    Bug(
        name="snapshots not looked at",
        module=_LINK,
        where="NodeLink._release",
        old="self._judge_snapshot(message.fragment)",
        new="pass",
        harm="parameters that are not finite stop a swarm in silence",
        killed_by=(f"{_LINK_TESTS}::test_parameters_that_are_not_finite_are_told_once_and_once_that_they_are_again",),
    ),
    # -- threads for tensors -------------------------------------------------------------------------------------------
    Bug(
        name="threads do not wait for each other",
        module="p2pdiloco.util.executor",
        where="WorkQueue.do",
        old="threading.Barrier(len(self._jobs))",
        new="threading.Barrier(1)",
        harm="a snapshot is brought up to date while a shift of one of its shards is being made",
        killed_by=(f"{_QUEUE}::test_the_order_of_what_has_a_key_and_of_what_has_none_is_kept",),
    ),
    Bug(
        name="a shard has no thread of its own",
        module="p2pdiloco.util.executor",
        where="WorkQueue.do",
        old="self._jobs[(key or 0) % len(self._jobs)]",
        new="min(self._jobs, key=lambda jobs: jobs.qsize())",
        harm="a shard's next commit is applied before the one that it follows",
        killed_by=(f"{_QUEUE}::test_the_order_of_what_has_a_key_and_of_what_has_none_is_kept",),
    ),
    Bug(
        name="threads share their scratch",
        module="p2pdiloco.peer.model_state",
        where="",
        old="class _Scratch(threading.local):\n    ...",
        new="class _Scratch:\n    ...",
        harm="a merge has another shard's values",
        killed_by=("tests/unit/test_peer_tensor_threads.py::test_several_threads_make_the_bits_of_one",),
    ),
)
