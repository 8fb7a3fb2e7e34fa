"""Bugs of what comes out of a run, of scripts that share data, of a machine that others use, too; see ``planted``."""

from __future__ import annotations

from p2pdiloco.simulation.planter import Bug

_EXPORT = "p2pdiloco.training.export"
_SAMPLES = "p2pdiloco.training.samples"
_NOTICES = "p2pdiloco.node.notices"

_EXPORT_TESTS = "tests/unit/test_training_export.py"
_SAMPLES_TESTS = "tests/unit/test_training_samples.py"
_NOTICES_TESTS = "tests/unit/test_node_notices.py"
_THREADS_TESTS = "tests/unit/test_training_threads.py"
_FIGURES_TESTS = "tests/unit/test_node_figures.py"

BUGS = (
    Bug(
        name="gate and up are exchanged in an export",
        module=_EXPORT,
        old='("mlp.gate_proj.weight", "mlp.up_proj.weight")',
        new='("mlp.up_proj.weight", "mlp.gate_proj.weight")',
        harm="the exported model loads, and speaks nonsense",
        killed_by=(f"{_EXPORT_TESTS}::test_the_built_in_transformer_is_a_llama_to_transformers",),
    ),
    Bug(
        name="an export replaces whatever is there",
        module=_EXPORT,
        old="if folder.exists() and any(folder.iterdir()) and not (folder / ABOUT).exists():",
        new="if False:",
        harm="--out ~ removes a home",
        killed_by=(f"{_EXPORT_TESTS}::test_only_an_earlier_export_is_replaced",),
    ),
    Bug(
        name="every peer takes every piece",
        module=_SAMPLES,
        old="if owner(tuple({*peers, me}), epoch, piece) == me:",
        new="if True:",
        harm="a second machine adds nothing",
        killed_by=(f"{_SAMPLES_TESTS}::test_an_epoch_is_parted_among_those_who_train",),
    ),
    Bug(
        name="who trains is looked at once an epoch",
        module=_SAMPLES,
        old="            me, peers = self._known()\n            if owner",
        new="            me, peers = self.__dict__.setdefault('first', self._known())\n            if owner",
        harm="whoever comes later trains what the others do",
        killed_by=(f"{_SAMPLES_TESTS}::test_who_comes_and_goes_changes_what_is_left_of_the_epoch",),
    ),
    Bug(
        name="pieces in the same order everywhere",
        module=_SAMPLES,
        old='f"{me}/{epoch}/{piece}"))',
        new='f"{epoch}/{piece}"))',
        harm="peers that do not know each other yet train the same batches",
        killed_by=(f"{_SAMPLES_TESTS}::test_no_batch_is_the_same_even_where_samples_are",),
    ),
    Bug(
        name="ranks of an island draw the same",
        module=_SAMPLES,
        old="islice(self._stream, self._rank, len(self) * self._replicas, self._replicas)",
        new="islice(self._stream, 0, len(self) * self._replicas, self._replicas)",
        harm="the GPUs of a machine train the same samples",
        killed_by=(f"{_SAMPLES_TESTS}::test_ranks_of_an_island_divide_what_is_their_peers",),
    ),
    Bug(
        name="the same batches elsewhere are not seen",
        module="p2pdiloco.node.figures",
        old="if mine.intersection(one.first_batches)",
        new="if mine == set(one.first_batches)",
        harm="two scripts train the same, and nobody says so unless all their batches are",
        killed_by=(f"{_FIGURES_TESTS}::test_a_peer_with_the_same_first_batches_is_named",),
    ),
    Bug(
        name="a machine that is taken back trains on",
        module=_NOTICES,
        old='b"action" in data',
        new='b"ACTION" in data',
        harm="what was not merged is lost with it",
        killed_by=(f"{_NOTICES_TESTS}::test_a_notice_is_told_from_none",),
    ),
    Bug(
        name="a scheduler that repeats its signal kills",
        module=_NOTICES,
        old="elif number in IMPATIENT:",
        new="else:",
        harm="SLURM's second SIGUSR1 throws away what the first was to save",
        killed_by=(f"{_NOTICES_TESTS}::test_signals",),
    ),
    Bug(
        name="a moment's work stops a peer",
        module="p2pdiloco.node.guest",
        old="if self._looks >= (BUSY_LOOKS if is_busy else IDLE_LOOKS):",
        new="if self._looks >= 1:",
        harm="a peer that trains only when idle never does",
        killed_by=(
            "tests/unit/test_node_guest.py::test_others_are_busy_after_a_moment_and_not_any_more_after_a_while",
        ),
    ),
    Bug(
        name="a pause that does not end",
        module="p2pdiloco.node.guest",
        old="(folder / PAUSED).unlink(missing_ok=True)",
        new="pass",
        harm="a machine that was paused once never helps again",
        killed_by=("tests/unit/test_node_guest.py::test_paused_by_its_user_until_told_otherwise",),
    ),
    Bug(
        name="threads are never measured again",
        module="p2pdiloco.training.threads",
        old="if self._usual_s / CHANGED <= now_s <= self._usual_s * CHANGED:",
        new="if True:",
        harm="a learner that began beside other work stays slow",
        killed_by=(f"{_THREADS_TESTS}::test_another_load_is_measured_anew_after_a_while",),
    ),
    Bug(
        name="checkpoints without a budget",
        module="p2pdiloco.peer.saver",
        old="max(LOOK_S, least_s, min(rest_s, every_s))",
        new="max(LOOK_S, min(rest_s, every_s))",
        harm="a small peer writes hundreds of gigabytes a day",
        killed_by=("tests/unit/test_peer_saver.py::test_what_is_written_a_day_is_budgeted",),
    ),
)
