"""Names of the groups of tags, and how TensorBoard's page "Custom scalars" arranges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

OVER_REQUESTS = "over_requests/"
"""cumulative, one point per finished request"""
OVER_TOKENS = "over_tokens/"
"""the same over committed tokens: in lossless modes all policies are at the same place of the same text"""
REQUEST = "request/"
"""each request alone"""
INTERVAL = "speedup_interval/"
"""speed-up over plain decoding with the ends of its interval"""
AGAINST = "vs_assc/"
"""tokens per second over those of the ASSC heuristic, with the ends of the interval"""
ROUNDS = "rounds/"
"""histograms"""
HEALTH = "health/"
"""what the health monitor says of the last rounds, one point per finished request"""
PICTURES = "pictures/"
PROGRESS = "eval/"
"""the policy in training and its baselines on the same requests"""
HELD_OUT = "held_out/"
"""the comparison after training: one point per policy"""

Layout = dict[str, dict[str, list[object]]]

CHARTS: Mapping[str, str] = {
    "tokens per GPU-second": "tokens_per_gpu_second",
    "speed-up over plain decoding": "speedup",
    "acceptance rate": "acceptance_rate",
    "waste rate": "waste_rate",
    "mean K": "mean_k",
    "tokens per round": "tokens_per_round",
    "rollback rate": "rollback_rate",
    "entropy of the target (nats)": "target_entropy",
    "draft share of the time": "draft_time_share",
}
"""title -> name of the scalar"""


def _exactly(tag: str) -> str:
    """A regular expression that matches the tag alone."""
    return f"^{tag}$"


def _lines(group: str, names: Sequence[str] | None = None) -> dict[str, list[object]]:
    titles = CHARTS if names is None else {t: n for t, n in CHARTS.items() if n in names}
    return {title: ["Multiline", [_exactly(group + name)]] for title, name in titles.items()}


def _margin(group: str, value: str) -> list[object]:
    return ["Margin", [group + value, group + "low", group + "high"]]


def evaluation_layout(has_heuristic: bool) -> Layout:
    """Policies against ASSC where it is played, else against plain decoding; then every scalar over both axes."""
    plain = {"speed-up with its 95 % interval": _margin(INTERVAL, "speedup")}
    heuristic = {"tokens per second over those of ASSC, 95 % interval": _margin(AGAINST, "ratio")}
    # a category of their own: TensorBoard puts bands behind all charts of lines
    first: Layout = {"policy vs ASSC": {**heuristic, **plain}} if has_heuristic else {"policy vs plain decoding": plain}
    return {**first, "over requests": _lines(OVER_REQUESTS), "over committed tokens": _lines(OVER_TOKENS)}


def training_layout() -> Layout:
    """The policy in training against its baselines, and what it did while it explored."""
    known = [name for name in CHARTS.values() if name != "target_entropy"]  # nobody asks for it while training
    exploring = [name for name in known if name != "speedup"]  # of rounds that plain decoding does not play
    return {
        "training: policy vs baselines (same requests)": _lines(PROGRESS, known),
        "rounds of training": _lines("decode/", exploring),
    }
