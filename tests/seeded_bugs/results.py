"""Bugs of what comes out of a run, of fragments, of scripts that share data, of a machine that others use, too; see
``planted``."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_EXPORT = "p2pdiloco.training.export"
_NOTICES = "p2pdiloco.node.shutdown_signals"

_EXPORT_TESTS = "tests/unit/test_training_export.py"
_NOTICES_TESTS = "tests/unit/test_node_shutdown_signals.py"

_FOUNDING_TESTS = "tests/unit/test_training_founding_file.py"
_FOUNDATION_TESTS = "tests/unit/test_node_run_creation.py"

BUGS = (
    Bug(
        name="a script's founding is written in its place",
        module="p2pdiloco.training.founding_file",
        where="write",
        old="stream_atomically(path, chain((len(text).to_bytes(8, 'little') + text,), _pieces(named)))",
        new="path.open('wb').writelines(chain((len(text).to_bytes(8, 'little') + text,), _pieces(named)))",
        harm="a script that was killed meanwhile cannot found its run any more",
        killed_by=(
            f"{_FOUNDING_TESTS}::test_a_script_that_is_killed_while_it_founds_leaves_nothing_that_is_taken_for_whole",
        ),
    ),
    Bug(
        name="an export replaces whatever is there",
        module=_EXPORT,
        where="_check_replaceable",
        old=(
            "folder.exists() and any(folder.iterdir()) and (not any(((folder / name).exists() for name in "
            "(ABOUT, TORN))))"
        ),
        new="folder.exists() and False",
        harm="--out ~ removes a home",
        killed_by=(f"{_EXPORT_TESTS}::test_only_an_earlier_export_is_replaced",),
    ),
    Bug(
        name="an export that was cut off forgets the one before",
        module=_EXPORT,
        where="_replace",
        old="(*files, *before)",
        new="files",
        harm="the next export leaves a configuration beside weights that are not its own",
        killed_by=(f"{_EXPORT_TESTS}::test_an_export_that_is_cut_off_is_replaced_by_the_next",),
    ),
    Bug(
        name="an export's temporary files lie beside a link",
        module=_EXPORT,
        where="export",
        old=(
            "folder = folder.resolve()\n"
            "config, half = (manifest.config.model, "
            "folder.with_name(f'{folder.name}.{os.urandom(4).hex()}.part'))"
        ),
        new=("config, half = (manifest.config.model, folder.with_name(f'{folder.name}.{os.urandom(4).hex()}.part'))"),
        harm="--out is a link to another disk: the earlier export is removed, and the new one cannot take its place",
        killed_by=(f"{_EXPORT_TESTS}::test_an_export_follows_a_link",),
    ),
    Bug(
        name="what is put aside a second time takes the first one's place",
        module="p2pdiloco.peer.checkpoint",
        where="go_back",
        old="next((aside for aside in _asides() if not any((name.startswith(aside) for name in there))))",
        new="ASIDE",
        harm="who goes back twice has lost what was newer the first time, and was told that it is kept",
        killed_by=(
            "tests/unit/test_peer_checkpoint_known_good.py::test_the_last_from_which_training_went_on_stays_however_long_it_goes_wrong",
        ),
    ),
    Bug(
        name="a scheduler that repeats its signal kills",
        module=_NOTICES,
        where="leave_when_asked.on_signal",
        old="if number in IMPATIENT and loop.time() >= same_until:\n    node.abandon(number.name)",
        new="node.abandon(number.name)",
        harm="SLURM's second SIGUSR1 throws away what the first was to save",
        killed_by=(f"{_NOTICES_TESTS}::test_signals",),
    ),
    Bug(
        name="a signal that a wrapper forwards ends a peer at once",
        module=_NOTICES,
        where="leave_when_asked.on_signal",
        old="number in IMPATIENT and loop.time() >= same_until",
        new="number in IMPATIENT",
        harm="the progress that is not merged yet is lost at one Ctrl+C",
        killed_by=(
            f"{_NOTICES_TESTS}::"
            "test_a_signal_that_comes_again_within_a_second_is_the_same_one_also_while_the_peer_closes",
        ),
    ),
    # -- what is measured ----------------------------------------------------------------------------------------------
    Bug(
        name="a founder's held-out text travels unasked",
        module="p2pdiloco.training.evaluation",
        where="shared_samples",
        old="config.data.kind == 'stdlib' if config.evaluation.shared is UNSET else config.evaluation.shared",
        new="config.evaluation.shared is UNSET or config.evaluation.shared",
        harm="everybody who is let in can read a part of its files",
        killed_by=(
            f"{_FOUNDATION_TESTS}::test_held_out_samples_travel_only_if_they_are_public_or_the_founder_says_so",
        ),
    ),
)
