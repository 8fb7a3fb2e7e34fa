"""Base settings of the cells: what ships, and what shipped before."""

from __future__ import annotations

import msgspec

from benchmarks.quality.settings import Setting
from p2pdiloco.protocol.manifest import ModelConfig, OuterConfig
from p2pdiloco.protocol.manifest_defaults import inner_optimizer, is_bias_corrected

SEEDS = (1, 2, 3)
UNEVEN = (1.0, 1.0, 2.0, 4.0)
RDA = {"merge": "rda", "outer_rate": 0.7, "outer_momentum": 0.3}
BASE = Setting(outer_rate=0.7, outer_momentum=0.3)
"""What was shipped when most of the sweeps with AdamW were run."""
MUON = Setting(batch=64, inner="muon", learning_rate=8e-3)
"""Where the gap to data parallel is small enough that smaller differences can be seen."""
SHIPPED = msgspec.structs.replace(
    MUON,
    inner=inner_optimizer(ModelConfig()),
    outer_rate=OuterConfig().learning_rate,
    outer_momentum=OuterConfig().momentum,
    merge=OuterConfig().merge,
    bounded=True,
)
"""What a founder of a long run gets who sets nothing but the model, its batch and its inner rate; but momentum in
float32."""


def as_shipped(**changes: object) -> Setting:
    """``SHIPPED``, changed; the momentum's bias is corrected as in runs of that length, unless ``changes`` say."""
    found = msgspec.structs.replace(SHIPPED, **changes)
    is_corrected = is_bias_corrected(OuterConfig(), found.steps // found.sync_every)
    return found if "correction" in changes else msgspec.structs.replace(found, correction=is_corrected)
