"""The rung of the ladder on which a policy stands: what it knows when it decides, by what it declares itself.

From the bottom: plain decoding, a fixed action, rules on the history of acceptance, rules on signals of the moment,
what was fitted to such signals, and the hindsight optimum. Nothing goes by a policy's name, so one of your own finds
its rung too (docs/evaluation.md).
"""

from __future__ import annotations

from typing import Any

PLAIN, STATIC, RANDOM, HISTORY, CONFIDENCE, LEARNED, ORACLE = (
    "plain",
    "static",
    "random",
    "history",
    "confidence",
    "learned",
    "oracle",
)
RUNGS: dict[str, str] = {
    PLAIN: "plain decoding, the baseline",
    STATIC: "reads nothing: one action in all rounds",
    RANDOM: "reads nothing and draws its actions",
    HISTORY: "reads finished rounds (H, seconds), the load (L) or the temperature; learned online or not",
    CONFIDENCE: "a rule that reads signals of the moment besides: the draft's confidence (C), the target's entropy (E) "
    "or the n-gram match (N)",
    LEARNED: "fits a model to such signals, online or beforehand, or was saved after training",
    ORACLE: "knows the text: the hindsight optimum",
}
"""name of a rung -> what its policies know, from the bottom up"""

SIGNALS = frozenset("CEN")
"""in `uses`: signals of the decision point itself"""


def rung_of(policy: Any) -> str | None:
    """The name of the rung, None for a policy that does not say what it `uses`. Plain decoding counts as static.

    Read are the attributes `privileged`, `saved_table` (set in a policy loaded from a file), `uses`, `learner`,
    `learned` and, in one that goes around another policy, `inner` (`policies.base.BasePolicy`).

    >>> class Rule: uses, learned = "H, N", ()
    >>> class Model: uses, learner = "H, N", True
    >>> class Around: uses, inner = "H, seconds, and those of the policy", Model()
    >>> class Mute: pass
    >>> [rung_of(p()) for p in (Rule, Model, Around, Mute)]
    ['confidence', 'learned', 'learned', None]
    """
    if getattr(policy, "privileged", False):
        return ORACLE
    if getattr(policy, "saved_table", None) is not None:
        return LEARNED
    uses = getattr(policy, "uses", "")
    if not uses:
        return None
    own = _by_uses({part.strip() for part in uses.split(",")} - {"-"}, policy)
    inner = rung_of(policy.inner) if hasattr(policy, "inner") else None
    return own if inner is None else max(own, inner, key=list(RUNGS).index)


def _by_uses(uses: set[str], policy: Any) -> str:
    if uses & SIGNALS:
        return LEARNED if getattr(policy, "learner", False) else CONFIDENCE
    if uses:
        return HISTORY
    return RANDOM if getattr(policy, "learned", ()) else STATIC
