"""A synthetic source whose predictability switches between hidden regimes: no model, no recording.

Position by position a hidden regime is kept with probability `stay`, else drawn anew from all regimes. Given the
regime, each drafter agrees with the text at this position with the regime's probability, independently of other
positions, and the target's entropy is drawn around the regime's own, so that it tells something about it but not all.

| parameter | unit | meaning |
|---|---|---|
| `stay` | probability | of keeping the regime from one token to the next; mean length 1/(1 - stay) tokens or more |
| `alpha` | probability | the model draft agrees at a position |
| `ngram` | probability | the n-gram drafter agrees at a position, given that it proposes |
| `hit` | probability | the n-gram drafter proposes at all |
| `entropy` | nats | mean of the target's entropy (gamma distributed, shape `SHAPE`) |
| `eos` | probability | the text ends at a position |

The draft's entropy is the target's, blurred, and larger where the draft is going to disagree: informative, not perfect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assc.core import Request
from assc.costs import CostModel, DrafterCost
from assc.errors import RequestError
from assc.positions import PositionBackend, Text
from assc.steps import STEP_COLUMNS, encode
from assc.trace import FINISHES, DrafterInfo, Header, Trace, runs
from assc.trace_build import build_trace
from assc.trace_rules import budget_of

VOCABULARY = 1000
SHAPE = 4.0
"""of the gamma distribution of entropies: standard deviation = half the mean"""


@dataclass(frozen=True)
class Regime:
    """One hidden state (see the module's table)."""

    alpha: float
    ngram: float
    hit: float
    entropy: float


REGIMES: tuple[Regime, ...] = (
    Regime(alpha=0.90, ngram=0.95, hit=0.8, entropy=0.3),
    Regime(alpha=0.65, ngram=0.40, hit=0.3, entropy=1.2),
    Regime(alpha=0.30, ngram=0.15, hit=0.1, entropy=3.0),
)
"""repetitive, ordinary and surprising text"""


DRAWS = 128
"""positions drawn at a time"""


def _draws(rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The random numbers of the next `DRAWS` positions: uniform [7, DRAWS], gamma and normal [DRAWS]."""
    return rng.random((7, DRAWS)), rng.gamma(SHAPE, 1 / SHAPE, DRAWS), rng.normal(size=DRAWS)


@dataclass(frozen=True)
class MarkovSource:
    """All parameters of the synthetic source. Raises `ValueError` for probabilities outside 0..1."""

    regimes: tuple[Regime, ...] = REGIMES
    stay: float = 0.95
    eos: float = 0.005
    k_max: int = 16
    weights: tuple[float, ...] = ()
    """chances of the regimes where one is drawn; empty: all the same"""
    start: dict[str, int] = field(default_factory=dict)
    """category -> regime that its requests start in; others start anywhere"""

    def __post_init__(self) -> None:
        chances = [self.stay, self.eos, *(p for r in self.regimes for p in (r.alpha, r.ngram, r.hit))]
        if not self.regimes or not all(0 <= p <= 1 for p in chances) or min(r.entropy for r in self.regimes) <= 0:
            raise ValueError("a Markov source needs regimes with probabilities within 0..1 and entropies above 0")
        if self.weights and (len(self.weights) != len(self.regimes) or min(self.weights) < 0 or sum(self.weights) <= 0):
            raise ValueError("the weights of a Markov source are one per regime, 0 or more, and not all 0")

    @property
    def header(self) -> Header:
        model = DrafterInfo("model", "model", "drafts", confidence=True, steps=self.k_max)
        drafters = (model, DrafterInfo("ngram", "ngram"))
        return Header("greedy", self.k_max, drafters, pair="markov", device="none", dtype="none")

    def draw(self, request: Request) -> dict[str, Any]:
        """Columns [T] of one request, which depend on its seed, category and budget alone."""
        rng = np.random.default_rng([request.seed, 0xA55C])
        most = request.max_new_tokens
        drawn = int(self._pick(rng.random())) if self.weights else int(rng.integers(len(self.regimes)))
        first = self.start.get(request.category, drawn)
        # drawn block by block, so a text is a prefix of that with a larger budget
        blocks = [_draws(rng) for _ in range(-(-most // DRAWS))]
        uniform = np.concatenate([b[0] for b in blocks], axis=1)
        gamma, blur = (np.concatenate([b[i] for b in blocks]) for i in (1, 2))
        kept, ends = uniform[3] < self.stay, uniform[4] < self.eos
        fresh = self._pick(uniform[5]) if self.weights else (uniform[5] * len(self.regimes)).astype(np.int64)
        tokens = (uniform[6] * VOCABULARY).astype(np.int64)
        kept[0], fresh[0] = False, first
        regime = fresh[np.maximum.accumulate(np.where(kept, 0, np.arange(len(kept))))]
        stop = np.flatnonzero(ends[:most])
        size = int(stop[0]) + 1 if len(stop) else most
        table = np.array([(r.alpha, r.ngram, r.hit, r.entropy) for r in self.regimes])
        alpha, copied, hit, level = table[regime[:size]].T
        agree, copies, hits = uniform[0, :size] < alpha, uniform[1, :size] < copied, uniform[2, :size] < hit
        entropy = level * gamma[:size]
        draft = np.abs(entropy + 0.3 * blur[:size]) + np.where(agree, 0.0, 0.5)
        available = np.full(size, self.k_max)
        top1 = np.exp(-draft / 2)
        # of step j from a position the draft thinks what it thinks at the position j further on, also off the text
        codes = np.array([encode(h, p, p / 2, p) for h, p in zip(draft.tolist(), top1.tolist(), strict=True)], np.uint8)
        ahead = np.arange(size)[:, None] + np.arange(self.k_max)
        steps = np.pad(codes, ((0, self.k_max), (0, 0)), "edge")[ahead]
        return {
            "tokens": tokens[:size].astype(np.int32),
            "finish": FINISHES.index("eos" if len(stop) else "length"),
            "target_entropy": entropy.astype(np.float32),
            "target_top1": np.exp(-entropy / 2).astype(np.float32),
            "match": np.where(hits, 2 + 4 * copies, 0).astype(np.int8),
            "acc/model": np.minimum(runs(agree), available).astype(np.int8),
            "avail/model": available.astype(np.int8),
            "entropy/model": draft.astype(np.float32),
            "top1/model": top1.astype(np.float32),
            "margin/model": (top1 / 2).astype(np.float32),
            **{f"step_{name}/model": steps[:, :, i] for i, name in enumerate(STEP_COLUMNS)},
            "acc/ngram": np.where(hits, np.minimum(runs(copies), available), 0).astype(np.int8),
            "avail/ngram": np.where(hits, available, 0).astype(np.int8),
        }

    def _pick(self, uniform: float | NDArray[np.float64]) -> NDArray[np.int64]:
        """The regimes that uniform numbers choose by the weights."""
        ends = np.cumsum(self.weights)[:-1] / sum(self.weights)
        return np.searchsorted(ends, uniform, side="right").astype(np.int64)

    def trace(self, requests: Sequence[Request]) -> Trace:
        """A trace of these requests, for the vectorised replay and the oracle."""
        fixed = [(r, "held-out" if i % 3 == 0 else "train", self.draw(r), 0) for i, r in enumerate(requests)]
        return build_trace(self.header, fixed)


MARKOV_COSTS = CostModel(
    target_fixed=0.020,
    target_per_token=0.0001,
    drafters={"model": DrafterCost(0.0016, per_catch_up=0.0001), "ngram": DrafterCost(0.0, per_call=0.00003)},
    overhead=0.0005,
    label="assumed, for the synthetic source: c = 0.08, verification nearly free",
)


def markov_requests(n: int = 64, *, max_new_tokens: int = 96, seed: int = 0) -> list[Request]:
    """Requests m0, m1, … that differ in their seed; the prompt spells it, since it is all that there is to read."""
    seeds = np.random.default_rng(seed).integers(0, 2**31, n)
    sampling = {"mode": "greedy"}
    spelt = [
        (int(s) // VOCABULARY**2 % VOCABULARY, int(s) // VOCABULARY % VOCABULARY, int(s) % VOCABULARY) for s in seeds
    ]
    return [
        Request(p, max_new_tokens, int(s), f"m{i}", sampling=sampling)
        for i, (p, s) in enumerate(zip(spelt, seeds, strict=True))
    ]


class MarkovBackend(PositionBackend):
    """A `Backend` over the synthetic source; it plays any request of up to 4,096 tokens, by its seed."""

    def __init__(
        self,
        source: MarkovSource | None = None,
        cost_model: CostModel = MARKOV_COSTS,
        *,
        k_values: Sequence[int] | None = None,
    ) -> None:
        self.source = source or MarkovSource()
        super().__init__(self.source.header, cost_model, k_values=k_values)
        self._texts: dict[int, tuple[Request, Text]] = {}

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "backend": "markov"}

    def text_of(self, request: Request) -> Text:
        if not request.prompt_ids or budget_of(self.header, request) > 4096:
            raise RequestError("the synthetic source takes a prompt of at least one token and at most 4096 new tokens")
        known = self._texts.get(request.seed)
        if known is None or (known[0] is not request and known[0] != request):
            if len(self._texts) >= 1024:
                self._texts.clear()
            known = self._texts[request.seed] = (request, self._drawn(request))
        return known[1]

    def _drawn(self, request: Request) -> Text:
        c = self.source.draw(request)
        lists = {name: value.tolist() for name, value in c.items() if name != "finish" and value.ndim == 1}
        return Text(
            tokens=tuple(lists["tokens"]),
            finish=FINISHES[c["finish"]],
            entropy=lists["target_entropy"],
            top1=lists["target_top1"],
            match=lists["match"],
            acc={d: lists[f"acc/{d}"] for d in ("model", "ngram")},
            avail={d: lists[f"avail/{d}"] for d in ("model", "ngram")},
            peek=tuple(lists[f"{name}/model"] for name in ("entropy", "top1", "margin")),
            steps={"model": np.stack([c[f"step_{name}/model"] for name in STEP_COLUMNS], axis=-1)},
        )
