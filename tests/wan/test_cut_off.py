"""A home that was relayed to all others loses its relay, trains alone to the run's end, and says so: real processes,
real routers' address translation. It needs root."""

from __future__ import annotations

from pathlib import Path

import hasty
import pytest

from benchmarks.netbed.namespaces import TestbedError
from benchmarks.wan.homes import gathered
from benchmarks.wan.sites import network
from p2pdiloco.peer.ending import APART

pytestmark = [pytest.mark.xdist_group("wan"), pytest.mark.heavy]  # namespaces are the machine's

STEPS = 200
"""Some sixteen turns of a fragment, of which few are over when the relay goes."""
SOURCE = hasty.homes("test-cut", ann="keep", bob="keep", kim="random")


@pytest.mark.long
def test_who_is_cut_off_says_so_and_ends_with_4_and_the_others_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty.begin(monkeypatch)
    try:
        with (
            network(SOURCE, is_verified=False) as made,
            gathered(made, tmp_path, steps=STEPS, rests=True) as those,
        ):
            for home in those.homes:
                home.rest(False)
            hasty.trains(those, *those.homes)
            those.bootstrap.process.kill()
            statuses = {home.name: home.process.wait(hasty.WAIT_S) for home in those.homes}
            told = "\n\n".join(home.told()[-4000:] for home in those.homes)
            assert statuses == {"ann": 0, "bob": 0, "kim": APART}, told
            ann, bob, kim = (home.report() for home in those.homes)
            assert ann["digests"] == bob["digests"] != kim["digests"]
            assert kim["ending"]["status"] == APART
            assert "2 peers were lost at once" in kim["ending"]["reason"]
            assert kim["ending"]["reason"] in those.homes[-1].told(), "the user is told, and how both are made one"
            assert [report["tokens_unmerged"] for report in (ann, bob, kim)] == [0, 0, 0]
    except TestbedError as error:
        pytest.skip(str(error))
