"""Bugs of what comes out of a run, of fragments, of scripts that share data, of a machine that others use, too; see
``planted``."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

_EXPORT = "p2pdiloco.training.export"
_SCRIPT_MODELS = "p2pdiloco.training.script_models"
_SAMPLES = "p2pdiloco.training.sampler"
_NOTICES = "p2pdiloco.node.shutdown_signals"

_EXPORT_TESTS = "tests/unit/test_training_export.py"
_SCRIPT_MODELS_TESTS = "tests/unit/test_training_script_models.py"
_SAMPLES_TESTS = "tests/unit/test_training_sampler.py"
_NOTICES_TESTS = "tests/unit/test_node_shutdown_signals.py"
_THREADS_TESTS = "tests/unit/test_training_thread_tuning.py"
_FIGURES_TESTS = "tests/unit/test_node_swarm_status.py"

_FOUNDING_TESTS = "tests/unit/test_training_founding_file.py"
_FOUNDATION_TESTS = "tests/unit/test_node_run_creation.py"
_FRAGMENTS_TESTS = "tests/unit/test_codec_fragments.py"
_AVERAGE_TESTS = "tests/unit/test_peer_ema.py"

BUGS = (
    Bug(
        name="a script's founding is written in its place",
        module="p2pdiloco.training.founding_file",
        old='    stream_atomically(path, chain((len(text).to_bytes(8, "little") + text,), _pieces(named)))\n',
        new='    path.open("wb").writelines(chain((len(text).to_bytes(8, "little") + text,), _pieces(named)))\n',
        harm="a script that was killed meanwhile cannot found its run any more",
        killed_by=(
            f"{_FOUNDING_TESTS}::test_a_script_that_is_killed_while_it_founds_leaves_nothing_that_is_taken_for_whole",
        ),
    ),
    Bug(
        name="of every piece the first is written",
        module="p2pdiloco.training.founding_file",
        old="flat[start : start + PIECE].to(",
        new="flat[:PIECE].to(",
        harm="the run begins with another model than its script's",
        killed_by=(f"{_FOUNDING_TESTS}::test_what_is_written_in_pieces_is_version_zero_to_the_bit",),
    ),
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
        old="any(folder.iterdir()) and not any((folder / name).exists() for name in (ABOUT, TORN)):",
        new="False:",
        harm="--out ~ removes a home",
        killed_by=(f"{_EXPORT_TESTS}::test_only_an_earlier_export_is_replaced",),
    ),
    Bug(
        name="an export takes any name in an earlier one's folder",
        module=_EXPORT,
        old="    if others:\n",
        new="    if False:\n",
        harm="a config.json of the user's own is written over, or a folder in the way costs the earlier export",
        killed_by=(f"{_EXPORT_TESTS}::test_what_no_export_has_written_is_in_nobodys_way",),
    ),
    Bug(
        name="an export that was cut off forgets the one before",
        module=_EXPORT,
        old="files=(*files, *before)",
        new="files=files",
        harm="the next export leaves a configuration beside weights that are not its own",
        killed_by=(f"{_EXPORT_TESTS}::test_an_export_that_is_cut_off_is_replaced_by_the_next",),
    ),
    Bug(
        name="an export's temporary files lie beside a link",
        module=_EXPORT,
        old="    folder = folder.resolve()  # beside what it links to: one file system\n",
        new="",
        harm="--out is a link to another disk: the earlier export is removed, and the new one cannot take its place",
        killed_by=(f"{_EXPORT_TESTS}::test_an_export_follows_a_link",),
    ),
    Bug(
        name="an export of a part of a model is taken for the whole",
        module=_SCRIPT_MODELS,
        old="    if not absent:\n",
        new="    if True:\n",
        harm="the exported model loads, and what the run did not train is random",
        killed_by=(
            f"{_SCRIPT_MODELS_TESTS}::test_what_a_script_did_not_train_is_the_bases",
            f"{_SCRIPT_MODELS_TESTS}::test_a_base_that_lacks_a_tensor_is_refused",
        ),
    ),
    Bug(
        name="an export's model is not compared with the run's",
        module=_SCRIPT_MODELS,
        old="    if odd:\n",
        new="    if False:\n",
        harm="adapters with another rank or for other layers are taken for the run's",
        killed_by=(
            f"{_SCRIPT_MODELS_TESTS}::test_a_base_of_another_model_is_refused",
            f"{_SCRIPT_MODELS_TESTS}::test_a_configuration_of_another_model_is_refused",
            f"{_SCRIPT_MODELS_TESTS}::test_what_peft_does_not_keep_is_merged_or_refused",
        ),
    ),
    Bug(
        name="an adapter is merged into all that share its weights",
        module=_SCRIPT_MODELS,
        old="        if id(p) in seen:\n",
        new="        if False:\n",
        harm="an adapter on tied embeddings changes the output head, too: the merged model speaks nonsense",
        killed_by=(
            f"{_SCRIPT_MODELS_TESTS}::test_adapters_of_every_kind_go_out_merged_and_for_peft",
            f"{_SCRIPT_MODELS_TESTS}::test_a_run_that_names_its_model_is_merged_though_its_embeddings_are_tied",
        ),
    ),
    Bug(
        name="trained tensors that an adapter's file does not keep are left out",
        module=_SCRIPT_MODELS,
        old="    if left := [one for one, tensor in tensors.items() if id(tensor) not in kept]:\n",
        new="    if left := ():\n",
        harm="what a script trained beside its adapter is lost, and nobody is told",
        killed_by=(f"{_SCRIPT_MODELS_TESTS}::test_what_peft_does_not_keep_is_merged_or_refused",),
    ),
    Bug(
        name="what is put aside a second time takes the first one's place",
        module="p2pdiloco.peer.checkpoint",
        old="aside = next(aside for aside in _asides() if not any(name.startswith(aside) for name in there))",
        new="aside = ASIDE",
        harm="who goes back twice has lost what was newer the first time, and was told that it is kept",
        killed_by=(
            "tests/unit/test_peer_checkpoint_known_good.py::test_the_last_from_which_training_went_on_stays_however_long_it_goes_wrong",
        ),
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
        module="p2pdiloco.node.swarm_status",
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
        module="p2pdiloco.node.resource_guard",
        old="if self._looks >= (BUSY_LOOKS if is_busy else IDLE_LOOKS):",
        new="if self._looks >= 1:",
        harm="a peer that trains only when idle never does",
        killed_by=(
            "tests/unit/test_node_resource_guard.py::test_others_are_busy_after_a_moment_and_not_any_more_after_a_while",
        ),
    ),
    Bug(
        name="a pause that does not end",
        module="p2pdiloco.node.resource_guard",
        old="(folder / PAUSED).unlink(missing_ok=True)",
        new="pass",
        harm="a machine that was paused once never helps again",
        killed_by=("tests/unit/test_node_resource_guard.py::test_paused_by_its_user_until_told_otherwise",),
    ),
    Bug(
        name="threads are never measured again",
        module="p2pdiloco.training.thread_tuning",
        old="if self._usual_s / CHANGED <= now_s <= self._usual_s * CHANGED:",
        new="if True:",
        harm="a learner that began beside other work stays slow",
        killed_by=(f"{_THREADS_TESTS}::test_another_load_is_measured_anew_after_a_while",),
    ),
    Bug(
        name="checkpoints without a budget",
        module="p2pdiloco.peer.checkpoint_writer",
        old="max(LOOK_S, least_s, min(rest_s, every_s))",
        new="max(LOOK_S, min(rest_s, every_s))",
        harm="a small peer writes hundreds of gigabytes a day",
        killed_by=("tests/unit/test_peer_checkpoint_writer.py::test_what_is_written_a_day_is_budgeted",),
    ),
    # -- the running average -------------------------------------------------------------------------------------------
    Bug(
        name="an average of all versions since the beginning",
        module="p2pdiloco.peer.ema",
        old="return (POWER + 1) / (look + POWER)",
        new="return 1.0 / look",
        harm="the untrained model stays in it to the end",
        killed_by=(f"{_AVERAGE_TESTS}::test_a_follower_averages_every_version_that_it_takes",),
    ),
    Bug(
        name="a spoilt average is read",
        module="p2pdiloco.peer.ema",
        old="if digest_of(data) != digest:",
        new="if False:",
        harm="a flipped bit of the disk stays in it for a long time",
        killed_by=(f"{_AVERAGE_TESTS}::test_an_average_goes_on_in_the_next_life_and_a_spoilt_one_begins_anew",),
    ),
    Bug(
        name="an average does not look at what was fetched",
        module="p2pdiloco.peer.driver",
        old="lambda: self._looked(head.shard, self.state.install(head.shard, head.id, moves(), effect.farthest)),",
        new="lambda: self.state.install(head.shard, head.id, moves(), effect.farthest),",
        harm="a newcomer's begins with zeros where it has not seen a version yet, and is not saved for a turn",
        killed_by=(f"{_AVERAGE_TESTS}::test_a_newcomers_average_begins_with_what_it_fetched",),
    ),
    # -- fragments -----------------------------------------------------------------------------------------------------
    Bug(
        name="no tensor is cut among fragments",
        module="p2pdiloco.codec.fragments",
        old="        if max(loads) * fragments <= largest * total:\n",
        new="        if True:\n",
        harm="the turn of an embedding's fragment takes many times as long as others'",
        killed_by=(f"{_FRAGMENTS_TESTS}::test_an_embedding_is_cut_by_rows_and_nothing_is_where_that_is_not_needed",),
    ),
    Bug(
        name="a fragment's shards are taken to follow each other",
        module="p2pdiloco.protocol.state",
        old="placed = sorted((shard, FragmentId(f)) for f, shards in enumerate(config.fragments) for shard in shards)",
        new="placed = [(shard, FragmentId(f)) for f, shards in enumerate(config.fragments) for shard in shards]",
        harm="a part of a cut tensor is given at another fragment's turn",
        killed_by=("tests/unit/test_protocol_decisions.py::test_a_fragments_shards_need_not_follow_each_other",),
    ),
    Bug(
        name="a manifest's cut tensors are counted whole",
        module="p2pdiloco.protocol.manifest_validation",
        old="cut += [last - first for _, first, last in tensor.parts()]",
        new="cut += [tensor.elements]",
        harm="a sound run is refused, and a manifest of millions of shards is taken",
        killed_by=("tests/unit/test_protocol_manifest_validation.py::test_a_run_whose_embedding_is_cut_is_taken",),
    ),
    # -- what is measured ----------------------------------------------------------------------------------------------
    Bug(
        name="each learner measures on its own data",
        module="p2pdiloco.training.builtin_learner",
        old="config.evaluation.samples, self._device, self._given",
        new="config.evaluation.samples, self._device",
        harm="the curve jumps with who measures, where data differ",
        killed_by=(
            "tests/unit/test_training_builtin_learner.py::test_all_measure_on_the_runs_samples_whatever_their_data",
        ),
    ),
    Bug(
        name="a founder's held-out text travels unasked",
        module="p2pdiloco.training.evaluation",
        old='config.data.kind == "stdlib" if config.evaluation.shared is UNSET else config.evaluation.shared',
        new="config.evaluation.shared is UNSET or config.evaluation.shared",
        harm="everybody who is let in can read a part of its files",
        killed_by=(
            f"{_FOUNDATION_TESTS}::test_held_out_samples_travel_only_if_they_are_public_or_the_founder_says_so",
        ),
    ),
)
