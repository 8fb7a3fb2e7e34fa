"""What a seed stands for: how many peers, their speeds and links, who meets whom, what goes wrong, how it ends."""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

from p2pdiloco.protocol.config import Sizes
from p2pdiloco.protocol.groups import MOST_TOGETHER
from p2pdiloco.protocol.ids import PeerId, RunId, ShardId
from p2pdiloco.protocol.state import ProtocolConfig
from tests.machine_sim.faults import Fault, FaultRates, draw_faults, one_way, storm
from tests.machine_sim.network import LinkQuality, NetworkSetting
from tests.machine_sim.process import PeerSetting
from tests.machine_sim.shared_link_network import Bandwidth, on_the_line
from tests.simulation import topologies
from tests.simulation.topologies import Mesh

HEALING_S = 12.0
"""By then everybody is connected and current, and old requests have been given up."""
GLACIAL_S = 30.0
"""Step time of the odd learner that nobody may wait for."""
FORK_S = 30.0
"""Logs are long enough for forks that grew for this time: what is deeper is not promised to come back."""

MESH_PATIENCE = 3.0
"""Heads at rest go from peer to peer, some seconds for each step of the way."""
JOIN_S = 3.0
"""What the states of a newcomer may take of an uplink that carries nothing else."""
UPLINK_PATIENCE = 3.0
"""Who has come back waits for states behind others' payloads, and so do forks at rest."""
HIDDEN_SHARE = 0.1
"""Of peers, those behind routers: two of them never meet."""
POISON_SHARE = 0.1
"""Runs with a learner whose values are never finite."""
STORM_SHARE = 0.1
"""Runs in which one peer restarts again and again."""
STOP_SHARE = 0.03
"""Runs in which one peer stands still for up to two minutes."""
RUIN_AT_S, RUIN_S, RUIN_LOG = 14.0, 20.0, 64
"""When the model is ruined, how much longer faults last, and the least length of a log: time to go back."""
TOGETHER = (2, 3, 4)
"""Contributions that are merged together in a third of all runs: more make groups."""
TWINS_SHARE = 0.1
"""Runs whose learners all have the same speed, so that forks of equal weight are common."""

Ending = Literal["rest", "finish", "leave"]


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """A run as drawn from its seed."""

    seed: int
    config: ProtocolConfig
    """All but the peer and its weight."""
    network: NetworkSetting
    default_link: LinkQuality
    links: tuple[tuple[PeerId, PeerId, LinkQuality], ...]
    peers: tuple[tuple[PeerId, PeerSetting, float], ...]
    """Name, setting, and when it comes; the first is the founder."""
    clock_drift: float
    directory_lag_s: float
    checkpoint_every_s: float
    meshes: tuple[tuple[float, Mesh], ...]
    """Who cannot connect to whom, from when on; the last one stays to the end."""
    bandwidths: tuple[tuple[PeerId, Bandwidth], ...] = ()
    """Each peer's own line; none: every pair has its own."""
    patience: float = 1.0
    """How much longer healing and rest may take than where everybody is connected to everybody."""
    faults: tuple[Fault, ...]
    faults_s: float
    ending: Ending
    poison: tuple[PeerId, float] | None = None
    """The peer whose next contribution ruins the model, and the time from which on it may."""


MIXED = "mixed"
SCENARIOS: dict[str, FaultRates] = {
    "calm": FaultRates(),
    "crashes": FaultRates(crash=4.0, wipe=1.0, learner=3.0, blackout=1.0),
    "cuts": FaultRates(cut=6.0, mute=3.0, break_=6.0),
    "pauses": FaultRates(pause=4.0, slow=3.0),
    "leaves": FaultRates(leave=3.0, crash=1.0),
    "liars": FaultRates(),
    "early-liars": FaultRates(),
    "lying-owners": FaultRates(break_=1.0, pause=0.3, learner=0.3),
    "ruined": FaultRates(break_=1.0, pause=0.3, cut=0.3, crash=0.3, learner=0.3),
    "uplinks": FaultRates(crash=0.5, wipe=0.2, learner=0.5, pause=0.5, break_=1.0, cut=0.5, slow=0.5),
    "bounded": FaultRates(crash=1.0, wipe=0.2, learner=0.5, pause=0.5, mute=0.5, break_=2.0, cut=0.5, leave=1.0),
    "meshes": FaultRates(crash=0.5, wipe=0.2, learner=0.5, pause=0.5, mute=1.0, break_=2.0, cut=0.5),
}
"""Runs with only some kinds of faults, for ``simulate --scenario``; ``mixed`` draws all kinds from the seed."""


def draw_scene(seed: int, scenario: str = MIXED) -> Scene:
    """The run that ``seed`` names.

    Raises:
        KeyError: there is no such scenario.
    """
    random = Random(f"scene {seed}")
    size = random.choice((3, 3, 4, 4, 5, 5, 6, 7, 8, 10, 12))
    names = [PeerId(f"p{i}") for i in range(size)]
    fragments = random.randint(1, 3)
    sizes = [random.randint(1, 2) for _ in range(fragments)]
    shards = [[ShardId(sum(sizes[:f]) + i) for i in range(n)] for f, n in enumerate(sizes)]
    sync_every = fragments * random.randint(1, 4) * (2 if fragments < 3 else 1)
    fastest_s = random.choice((0.15, 0.25, 0.4))
    faults_s = random.choice((15.0, 20.0, 30.0))
    ending: Ending = random.choice(("rest", "rest", "finish", "leave"))
    drawn = _draw_rates(random)
    rates = drawn if scenario == MIXED else SCENARIOS[scenario]
    learners = 0
    hidden: list[PeerId] = []
    peers = []
    are_twins = Random(f"twins {seed}").random() < TWINS_SHARE
    for i, name in enumerate(names):
        has_learner = i < 2 or random.random() < 0.9
        learners += has_learner
        setting = PeerSetting(
            step_s=GLACIAL_S
            if i >= 3 and random.random() < 0.04
            else fastest_s * random.choice((1.0, 1.0, 1.3, 2.0, 4.0)),
            tokens_per_step=random.choice((7, 10, 16)),
            has_learner=has_learner,
            weight=_weight(random, hidden, name, is_hidden=i >= 2 and random.random() < HIDDEN_SHARE),
            work_s=min(random.choice((0.002, 0.01, 0.05)), 0.1 * sync_every * fastest_s / sum(sizes)),
            payload_bytes=random.choice((500, 5000)),
            learner_lag_s=random.choice((0.0, 0.0, 0.02)),
            failed_share=random.choice((0.0, 0.0, 0.02)),
        )
        if are_twins:
            learners += not has_learner
            setting = msgspec.structs.replace(
                setting, step_s=fastest_s, step_jitter=0.0, tokens_per_step=10, has_learner=True
            )
        comes_at = 0.0 if i == 0 else random.choice((0.0, 0.5, 5.0, faults_s * random.random()))
        peers.append((name, setting, comes_at))
    together = Random(f"groups {seed}").choice((*TOGETHER, *(MOST_TOGETHER,) * 6))
    config = ProtocolConfig(
        run=RunId(f"run {seed}"),
        peer=names[0],
        founder=names[0],
        fragments=tuple(tuple(f) for f in shards),
        sync_every=sync_every,
        overlap=random.randint(1, max(1, min(4, sync_every - 1))),
        min_quorum=min(random.choice((1, 1, 1, 2, 3)), learners),
        grace_share=random.choice((0.0, 0.5, 0.7, 1.0)),
        blocks=Random(f"blocks {seed}").choice((0, 7, 50, 400)),
        total_steps=int((faults_s + HEALING_S) / min(p.step_s for _, p, _ in peers if p.has_learner))
        if ending == "finish"
        else 10**9,
        together=together,
        takes_mean=Random(f"mean {seed}").random() < 0.5,
        is_overwrite=random.random() < 0.05,
        evaluation_every=random.choice((0, 2)),
        log_length=max(random.choice((16, 32)), int(FORK_S / (sync_every * fastest_s))),
        heartbeat_s=random.choice((0.5, 1.0)),
        takeover_floor_s=0.5,
        takeover_ceiling_s=4.0,
        request_s=3.0,
        leave_s=10.0 if together == MOST_TOGETHER else 20.0,
        finish_s=30.0,
    )
    delay_s = random.choice((0.002, 0.02, 0.08))
    load = 5000 * sum(sizes) / (sync_every * fastest_s)
    """Bytes a second of all commits; contributions are at most as many."""
    links = [
        (
            a,
            b,
            LinkQuality(
                delay_s=delay_s * random.choice((0.5, 1, 4)),
                jitter_s=delay_s * random.choice((0.1, 1, 3)),
                bytes_per_s=load * random.choice((3.0, 100.0)),
            ),
        )
        for a in names
        for b in names
        if a != b and random.random() < 0.5
    ]
    scene = Scene(
        seed=seed,
        config=config,
        network=NetworkSetting(
            duplicated_share=random.choice((0.0, 0.0, 0.02)),
            patience_s=random.choice((3.0, 8.0)),
            redial_s=random.choice((0.3, 1.0)),
            silent_close_share=random.choice((0.0, 0.3)),
        ),
        default_link=LinkQuality(delay_s=delay_s, jitter_s=delay_s * 0.3, bytes_per_s=1e6),
        links=tuple(links),
        peers=tuple(peers),
        clock_drift=random.choice((0.0, 1e-3, 1e-2)),
        directory_lag_s=random.choice((0.2, 2.0, 10.0)),
        checkpoint_every_s=random.choice((2.0, 10.0)),
        meshes=((0.0, topologies.behind_routers(names, set(names).difference(hidden))),),
        faults=tuple(draw_faults(random, rates, names, 1.0, faults_s)),
        faults_s=faults_s,
        ending=ending,
    )
    match scenario:
        case "liars":
            return with_liars(scene)
        case "early-liars":
            return with_early_liars(scene)
        case "lying-owners":
            return with_lying_owners(scene)
        case "ruined":
            return with_ruin(scene)
        case "meshes":
            return with_meshes(scene)
        case "uplinks":
            return with_uplinks(scene)
        case "bounded":
            return with_bounds(scene)
        case _:
            return with_rarities(scene) if scenario == MIXED else scene


def _weight(random: Random, hidden: list[PeerId], name: PeerId, *, is_hidden: bool) -> float:
    """Of a peer, which is noted if it is behind a router; then no weight is drawn."""
    if is_hidden:
        hidden.append(name)
        return 1.0
    return random.choice((1.0, 1.0, 3.0))


def with_meshes(scene: Scene) -> Scene:
    """The scene where not everybody can connect to everybody, and that changes, until the last pairs have found a
    relay."""
    random = Random(f"meshes {scene.seed}")
    names = [name for name, _, _ in scene.peers]
    times = [0.0, *sorted(scene.faults_s * random.random() for _ in range(random.choice((0, 0, 1, 2, 4))))]
    found = [(at, topologies.drawn(random, names)) for at in times]
    found.append((scene.faults_s, topologies.WHOLE))
    return msgspec.structs.replace(scene, meshes=tuple(found), patience=MESH_PATIENCE)


def with_uplinks(scene: Scene) -> Scene:
    """The scene where each peer's connections share one line, slower up than down: two to a hundred times what it must
    carry if every learner is in every commit and somebody takes its states."""
    random = Random(f"uplinks {scene.seed}")
    config, peers = scene.config, len(scene.peers)
    payload_bytes = max(setting.payload_bytes for _, setting, _ in scene.peers)
    round_s = config.sync_every * min(setting.step_s for _, setting, _ in scene.peers if setting.has_learner)
    control = peers * 300.0 / config.heartbeat_s
    state_bytes = max(setting.state_bytes for _, setting, _ in scene.peers)
    load = control + config.shards * (2 * on_the_line(payload_bytes) / round_s + state_bytes / JOIN_S)
    bandwidths = []
    for name, _, _ in scene.peers:
        up = load * random.choice((2.0, 4.0, 20.0, 100.0))
        bandwidths.append((name, Bandwidth(up_bytes_per_s=up, down_bytes_per_s=up * random.choice((1.0, 4.0, 10.0)))))
    links = tuple((a, b, msgspec.structs.replace(q, bytes_per_s=100 * load)) for a, b, q in scene.links)
    return msgspec.structs.replace(scene, bandwidths=tuple(bandwidths), links=links, patience=UPLINK_PATIENCE)


def with_bounds(scene: Scene) -> Scene:
    """More peers of the scene's kind, each connected to its group and to one peer of each other group."""
    random = Random(f"bounds {scene.seed}")
    kinds = [setting for _, setting, _ in scene.peers if setting.step_s < GLACIAL_S]
    count, together = random.choice((8, 12, 16, 24)), random.choice((3, 4, 6))
    peers = [
        (PeerId(f"p{i}"), kinds[i % len(kinds)], random.choice((0.0, 0.5, 5.0)) if i else 0.0) for i in range(count)
    ]
    names = [name for name, _, _ in peers]
    config = msgspec.structs.replace(scene.config, together=together, leave_s=20.0)
    return msgspec.structs.replace(
        scene,
        peers=tuple(peers),
        config=config,
        network=msgspec.structs.replace(scene.network, is_bounded=True, most_connections=random.choice((8, 12, 96))),
        faults=tuple(draw_faults(random, SCENARIOS["bounded"], names, 1.0, scene.faults_s)),
        meshes=(),
        patience=MESH_PATIENCE,
    )


def with_liars(scene: Scene) -> Scene:
    """Eight peers of the scene's kind, of which one or two lie now and then, or always, and merge what nobody gave."""
    random, wild = Random(f"liars {scene.seed}"), Random(f"wild {scene.seed}")
    honest = [setting for _, setting, _ in scene.peers if setting.step_s < GLACIAL_S and setting.has_learner]
    peers = [(PeerId(f"p{i}"), honest[i % len(honest)], 0.5 * i) for i in range(8)]
    for i in range(random.choice((1, 2))):
        name, setting, comes_at = peers[-1 - i]
        lies, wildness = random.choice((0.05, 0.3, 1.0)), wild.choice((0.0, 0.2, 1.0))
        peers[-1 - i] = (name, msgspec.structs.replace(setting, lies=lies, wildness=wildness), comes_at)
    config = msgspec.structs.replace(
        scene.config,
        min_quorum=min(2, scene.config.min_quorum),
        total_steps=10**5,
        sizes=Sizes(elements=(100,) * scene.config.shards),
    )
    return msgspec.structs.replace(scene, peers=tuple(peers), config=config, ending="rest")


def with_early_liars(scene: Scene) -> Scene:
    """Liars of a young run: they always lie, merge what nobody gave, and may be the first who join its founder."""
    scene = with_liars(scene)
    founder, *others = scene.peers
    order = list(range(1, len(scene.peers)))
    Random(f"stress {scene.seed}").shuffle(order)
    peers = [founder]
    for (name, setting, _), place in zip(others, order, strict=True):
        is_liar = bool(setting.lies)
        peers.append(
            (name, msgspec.structs.replace(setting, lies=1.0, wildness=1.0) if is_liar else setting, 0.5 * place)
        )
    return msgspec.structs.replace(scene, peers=tuple(peers))


def with_lying_owners(scene: Scene) -> Scene:
    """The scene with one or two peers whose merges are always wrong, or one in three."""
    random = Random(f"lying owners {scene.seed}")
    peers = list(scene.peers)
    for place in random.sample(range(len(peers)), 1 if len(peers) < 5 else random.choice((1, 2))):
        name, setting, comes_at = peers[place]
        dishonesty = random.choice((1.0, 1.0, 1 / 3))
        peers[place] = (name, msgspec.structs.replace(setting, dishonesty=dishonesty), comes_at)
    config = msgspec.structs.replace(scene.config, total_steps=10**6)
    return msgspec.structs.replace(scene, peers=tuple(peers), config=config, ending="rest")


def with_ruin(scene: Scene) -> Scene:
    """The scene with one contribution that ruins the model, after checkpoints and evaluations of a good one."""
    names = [name for name, setting, at in scene.peers if setting.has_learner and setting.step_s < GLACIAL_S and at < 1]
    config = msgspec.structs.replace(
        scene.config,
        evaluation_every=1,
        is_overwrite=False,
        log_length=max(RUIN_LOG, scene.config.log_length),
        total_steps=10**9,
    )
    return msgspec.structs.replace(
        scene,
        config=config,
        poison=(Random(f"ruin {scene.seed}").choice(names), RUIN_AT_S),
        faults_s=scene.faults_s + RUIN_S,
        checkpoint_every_s=2.0,
        ending="rest",
    )


def with_rarities(scene: Scene) -> Scene:
    """``scene``, and now and then what no usual run has: poison, restarts in a row, a long stop, deaf connections."""
    random = Random(f"rare {scene.seed}")
    peers, faults, faults_s = list(scene.peers), list(scene.faults), scene.faults_s
    names = [name for name, _, _ in peers]
    if random.random() < POISON_SHARE:
        name, setting, comes_at = peers[-1]
        healthy = sum(s.has_learner for _, s, _ in peers[:-1])
        if setting.has_learner and healthy >= scene.config.min_quorum:
            poisoned = msgspec.structs.replace(setting, poison=random.choice(("encode", "merge")))
            peers[-1] = (name, poisoned, comes_at)
    if random.random() < STORM_SHARE:
        faults += storm(random, names, faults_s)
    if random.random() < STOP_SHARE:
        stop_s = 20.0 + 100.0 * random.random()
        faults.append(Fault(at=faults_s, kind="pause", peers=(random.choice(names),), duration_s=stop_s))
        faults_s += stop_s
    faults += one_way(random, names, faults_s)
    faults.sort(key=lambda fault: fault.at)
    return msgspec.structs.replace(scene, peers=tuple(peers), faults=tuple(faults), faults_s=faults_s)


def _draw_rates(random: Random) -> FaultRates:
    """Each kind of fault is in about half of all runs."""

    def some(most: float) -> float:
        return most * random.random() if random.random() < 0.5 else 0.0

    return FaultRates(
        crash=some(2.0),
        wipe=some(1.0),
        learner=some(3.0),
        pause=some(2.0),
        cut=some(4.0),
        mute=some(1.5),
        break_=some(6.0),
        slow=some(2.0),
        leave=some(0.5),
        blackout=0.0 if random.random() < 0.9 else 2.0,
    )
