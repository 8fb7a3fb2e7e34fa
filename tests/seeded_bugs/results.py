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
_FIGURES_TESTS = "tests/unit/test_node_swarm_status.py"

_FOUNDING_TESTS = "tests/unit/test_training_founding_file.py"
_FOUNDATION_TESTS = "tests/unit/test_node_run_creation.py"
_FRAGMENTS_TESTS = "tests/unit/test_codec_fragments.py"
_AVERAGE_TESTS = "tests/unit/test_peer_ema.py"

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
        name="of every piece the first is written",
        module="p2pdiloco.training.founding_file",
        where="_pieces",
        old="flat[start:start + PIECE]",
        new="flat[:PIECE]",
        harm="the run begins with another model than its script's",
        killed_by=(f"{_FOUNDING_TESTS}::test_what_is_written_in_pieces_is_version_zero_to_the_bit",),
    ),
    Bug(
        name="gate and up are exchanged in an export",
        module=_EXPORT,
        where="",
        old=(
            "_IN_BLOCK = {'attention_norm.weight': ('input_layernorm.weight',), 'attention.qkv.weight': "
            "('self_attn.q_proj.weight', 'self_attn.k_proj.weight', 'self_attn.v_proj.weight'), "
            "'attention.out.weight': ('self_attn.o_proj.weight',), 'feed_norm.weight': "
            "('post_attention_layernorm.weight',), 'feed.gate_up.weight': ('mlp.gate_proj.weight', "
            "'mlp.up_proj.weight'), 'feed.down.weight': ('mlp.down_proj.weight',)}"
        ),
        new=(
            "_IN_BLOCK = {'attention_norm.weight': ('input_layernorm.weight',), 'attention.qkv.weight': "
            "('self_attn.q_proj.weight', 'self_attn.k_proj.weight', 'self_attn.v_proj.weight'), "
            "'attention.out.weight': ('self_attn.o_proj.weight',), 'feed_norm.weight': "
            "('post_attention_layernorm.weight',), 'feed.gate_up.weight': ('mlp.up_proj.weight', "
            "'mlp.gate_proj.weight'), 'feed.down.weight': ('mlp.down_proj.weight',)}"
        ),
        harm="the exported model loads, and speaks nonsense",
        killed_by=(f"{_EXPORT_TESTS}::test_the_built_in_transformer_is_a_llama_to_transformers",),
    ),
    Bug(
        name="GGUF holds Llama's queries as transformers does",
        module="p2pdiloco.training.gguf_export",
        where="_turned",
        old="tensor.view(heads, 2, side // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)",
        new="tensor",
        harm="llama.cpp loads the file, and speaks nonsense",
        killed_by=("tests/unit/test_training_gguf_export.py::test_each_architecture_has_the_same_logits",),
    ),
    Bug(
        name="a configuration is compared by its type alone",
        module=_SCRIPT_MODELS,
        where="_check_recorded",
        old="here.get(key) != there.get(key) and (not _IRRELEVANT.search(key))",
        new="False",
        harm="an export has another rotary base than the model that was trained, and nobody is told",
        killed_by=(f"{_SCRIPT_MODELS_TESTS}::test_what_a_run_records_needs_no_configuration_and_refuses_another",),
    ),
    Bug(
        name="any tokenizer is taken for the run's",
        module=_EXPORT,
        where="check_tokenizer",
        old="not data.tokenizer_digest",
        new="True",
        harm="the exported model reads other tokens than it was trained on",
        killed_by=(f"{_EXPORT_TESTS}::test_a_built_in_model_that_reads_tokens_goes_out_with_its_tokenizer",),
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
        name="trained tensors that an adapter's file does not keep are left out",
        module=_SCRIPT_MODELS,
        where="adapter_tensors",
        old="[one for one, tensor in tensors.items() if id(tensor) not in kept]",
        new="()",
        harm="what a script trained beside its adapter is lost, and nobody is told",
        killed_by=(f"{_SCRIPT_MODELS_TESTS}::test_what_peft_does_not_keep_is_merged_or_refused",),
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
        name="the workers of a loader know the peers of their start",
        module="p2pdiloco.training.streams",
        where="TrainingPeers.read",
        old="count != self._seen and (not count % 2)",
        new="not self._seen",
        harm="a second machine trains what the first one trains, too",
        killed_by=("tests/unit/test_training_streams.py::test_workers_follow_who_joins",),
    ),
    Bug(
        name="who trains is looked at once an epoch",
        module=_SAMPLES,
        where="OwnSamples.epoch",
        old=(
            "me, peers = self._known()\n"
            "if owner(tuple({*peers, me}), epoch, piece) == me:\n"
            "    own = order[piece * size:(piece + 1) * size]\n"
            "    yield from (own[i] for i in _shuffled(len(own), f'{me}/{epoch}/{piece}'))"
        ),
        new=(
            "me, peers = self.__dict__.setdefault('first', self._known())\n"
            "if owner(tuple({*peers, me}), epoch, piece) == me:\n"
            "    own = order[piece * size:(piece + 1) * size]\n"
            "    yield from (own[i] for i in _shuffled(len(own), f'{me}/{epoch}/{piece}'))"
        ),
        harm="whoever comes later trains what the others do",
        killed_by=(f"{_SAMPLES_TESTS}::test_who_comes_and_goes_changes_what_is_left_of_the_epoch",),
    ),
    Bug(
        name="pieces in the same order everywhere",
        module=_SAMPLES,
        where="OwnSamples.epoch",
        old="f'{me}/{epoch}/{piece}'",
        new="f'{epoch}/{piece}'",
        harm="peers that do not know each other yet train the same batches",
        killed_by=(f"{_SAMPLES_TESTS}::test_no_batch_is_the_same_even_where_samples_are",),
    ),
    Bug(
        name="tokens are kept for every share that is held out",
        module="p2pdiloco.training.tokenized_dataset",
        where="load_tokens",
        old="(_FORMAT, digest, config.kind, config.column, config.separator, config.held_out_share, max_bytes)",
        new="(_FORMAT, digest, config.kind, config.column, config.separator, max_bytes)",
        harm="a run trains on what its peers hold out",
        killed_by=(
            "tests/unit/test_training_tokenized_dataset.py"
            "::test_each_document_is_in_one_split_and_the_share_that_is_held_out_decides",
        ),
    ),
    Bug(
        name="ranks of an island draw the same",
        module=_SAMPLES,
        where="OwnSamples.__iter__",
        old="self._rank",
        new="0",
        harm="the GPUs of a machine train the same samples",
        killed_by=(f"{_SAMPLES_TESTS}::test_ranks_of_an_island_divide_what_is_their_peers",),
    ),
    Bug(
        name="the same batches elsewhere are not seen",
        module="p2pdiloco.node.swarm_status",
        where="SwarmStatus.ask_peers",
        old="mine.intersection(one.first_batches)",
        new="mine == set(one.first_batches)",
        harm="two scripts train the same, and nobody says so unless all their batches are",
        killed_by=(f"{_FIGURES_TESTS}::test_a_peer_with_the_same_first_batches_is_named",),
    ),
    Bug(
        name="a machine that is taken back trains on",
        module=_NOTICES,
        where="",
        old=(
            "CLOUDS = {'aws': Cloud('http://169.254.169.254', "
            "Question('/latest/meta-data/spot/instance-action', {}, lambda data: b'action' in data, "
            "'/latest/api/token')), 'gcp': Cloud('http://metadata.google.internal', "
            "Question('/computeMetadata/v1/instance/preempted', {'Metadata-Flavor': 'Google'}, lambda data: "
            "data.strip().upper() == b'TRUE')), 'azure': Cloud('http://169.254.169.254', "
            "Question('/metadata/scheduledevents?api-version=2020-07-01', {'Metadata': 'true'}, "
            "_has_preemption))}"
        ),
        new=(
            "CLOUDS = {'aws': Cloud('http://169.254.169.254', "
            "Question('/latest/meta-data/spot/instance-action', {}, lambda data: b'ACTION' in data, "
            "'/latest/api/token')), 'gcp': Cloud('http://metadata.google.internal', "
            "Question('/computeMetadata/v1/instance/preempted', {'Metadata-Flavor': 'Google'}, lambda data: "
            "data.strip().upper() == b'TRUE')), 'azure': Cloud('http://169.254.169.254', "
            "Question('/metadata/scheduledevents?api-version=2020-07-01', {'Metadata': 'true'}, "
            "_has_preemption))}"
        ),
        harm="what was not merged is lost with it",
        killed_by=(f"{_NOTICES_TESTS}::test_a_notice_is_told_from_none",),
    ),
    Bug(
        name="a scheduler that repeats its signal kills",
        module=_NOTICES,
        where="leave_when_asked.on_signal",
        old="if number in IMPATIENT:\n    node.abandon(number.name)",
        new="node.abandon(number.name)",
        harm="SLURM's second SIGUSR1 throws away what the first was to save",
        killed_by=(f"{_NOTICES_TESTS}::test_signals",),
    ),
    Bug(
        name="a moment's work stops a peer",
        module="p2pdiloco.node.resource_guard",
        where="Others.look",
        old="BUSY_LOOKS if is_busy else IDLE_LOOKS",
        new="1",
        harm="a peer that trains only when idle never does",
        killed_by=(
            "tests/unit/test_node_resource_guard.py::test_others_are_busy_after_a_moment_and_not_any_more_after_a_while",
        ),
    ),
    Bug(
        name="checkpoints without a budget",
        module="p2pdiloco.peer.checkpoint_writer",
        where="CheckpointWriter.keep_saving",
        old="max(LOOK_S, least_s, min(rest_s, every_s))",
        new="max(LOOK_S, min(rest_s, every_s))",
        harm="a small peer writes hundreds of gigabytes a day",
        killed_by=("tests/unit/test_peer_checkpoint_writer.py::test_what_is_written_a_day_is_budgeted",),
    ),
    # -- the running average -------------------------------------------------------------------------------------------
    Bug(
        name="an average of all versions since the beginning",
        module="p2pdiloco.peer.ema",
        where="weight",
        old="(POWER + 1) / (look + POWER)",
        new="1.0 / look",
        harm="the untrained model stays in it to the end",
        killed_by=(f"{_AVERAGE_TESTS}::test_a_follower_averages_every_version_that_it_takes",),
    ),
    Bug(
        name="a spoilt average is read",
        module="p2pdiloco.peer.ema",
        where="RunningAverage.load",
        old="digest_of(data) != digest",
        new="False",
        harm="a flipped bit of the disk stays in it for a long time",
        killed_by=(f"{_AVERAGE_TESTS}::test_an_average_goes_on_in_the_next_life_and_a_spoilt_one_begins_anew",),
    ),
    Bug(
        name="an average does not look at what was fetched",
        module="p2pdiloco.peer.driver",
        where="Driver._install",
        old="self._with_average(head.shard, self._state.install(head.shard, head.id, moves(), effect.farthest))",
        new="self._state.install(head.shard, head.id, moves(), effect.farthest)",
        harm="a newcomer's begins with zeros where it has not seen a version yet, and is not saved for a turn",
        killed_by=(f"{_AVERAGE_TESTS}::test_a_newcomers_average_begins_with_what_it_fetched",),
    ),
    # -- fragments -----------------------------------------------------------------------------------------------------
    Bug(
        name="no tensor is cut among fragments",
        module="p2pdiloco.codec.fragments",
        where="tensor_specs",
        old="max(loads) * fragments <= largest * total",
        new="True",
        harm="the turn of an embedding's fragment takes many times as long as others'",
        killed_by=(f"{_FRAGMENTS_TESTS}::test_an_embedding_is_cut_by_rows_and_nothing_is_where_that_is_not_needed",),
    ),
    Bug(
        name="a fragment's shards are taken to follow each other",
        module="p2pdiloco.protocol.state",
        where="Core.__init__",
        old="sorted(((shard, FragmentId(f)) for f, shards in enumerate(config.fragments) for shard in shards))",
        new="[(shard, FragmentId(f)) for f, shards in enumerate(config.fragments) for shard in shards]",
        harm="a part of a cut tensor is given at another fragment's turn",
        killed_by=("tests/unit/test_protocol_decisions.py::test_a_fragments_shards_need_not_follow_each_other",),
    ),
    Bug(
        name="a manifest's cut tensors are counted whole",
        module="p2pdiloco.protocol.manifest_validation",
        where="_count_shards",
        old="[last - first for _, first, last in tensor.parts()]",
        new="[tensor.elements]",
        harm="a sound run is refused, and a manifest of millions of shards is taken",
        killed_by=("tests/unit/test_protocol_manifest_validation.py::test_a_run_whose_embedding_is_cut_is_taken",),
    ),
    # -- what is measured ----------------------------------------------------------------------------------------------
    Bug(
        name="each learner measures on its own data",
        module="p2pdiloco.training.builtin_learner",
        where="Learner.evaluate",
        old=(
            "held_out_loss(self._model, self._corpus, config.model.context, config.evaluation.samples, "
            "self._device, self._given)"
        ),
        new=("held_out_loss(self._model, self._corpus, config.model.context, config.evaluation.samples, self._device)"),
        harm="the curve jumps with who measures, where data differ",
        killed_by=(
            "tests/unit/test_training_builtin_learner.py::test_all_measure_on_the_runs_samples_whatever_their_data",
        ),
    ),
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
