"""Behaviour cloning before PPO: the network first learns to decide as a rule does, then goes on from there.

A network that begins at random reaches a tuned rule from below and stays there (docs/training.md); one that begins as
the rule can only be moved where rewards say so. The rule is `NAME:tuned`, tuned on the train requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from assc.actions import ActionTable
from assc.core import Backend, Policy, Request
from assc.observe import Featurizer
from assc.registry import make_policy
from assc.rule_tuning import is_tuned_rule, tuned_rule

WANDER = 0.2
"""share of rounds that are played otherwise, so that histories differ as they will in training"""
SMOOTHING = 0.1
"""share of the probability that is spread over all actions: what is never tried cannot be learned"""
EPOCHS, BATCH, RATE = 6, 512, 1e-3


def demonstrations(
    backend: Backend,
    requests: Sequence[Request],
    rule: Policy,
    featurizer: Featurizer,
    table: ActionTable,
    rng: np.random.Generator,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Vectors [N, size] of decision points, and the table's index [N] of what the rule would do there.

    The rule's K is moved to the nearest one that the table lists for its drafter.
    """
    vectors, chosen = [], []
    needs = featurizer.needs | rule.needs
    for request in requests:
        backend.reset(request)
        rule.begin(backend.table)
        while not backend.done:
            seen = backend.observe(needs)
            action = rule.act(replace(seen, k_max=table.k_max))
            if action.drafter is not None:
                listed = table.k_values(action.drafter)
                action = replace(action, k=min(listed, key=lambda k: abs(k - action.k)))
            vectors.append(featurizer(seen))
            chosen.append(table.index(action))
            if rng.random() < WANDER:
                action = table.actions[int(rng.integers(len(table)))]
            rule.update(backend.step(action.clipped(seen.k_max)))
    return np.array(vectors), np.array(chosen, np.int64)


def imitate(
    model: Any, spec: str, backend: Backend, requests: Sequence[Request], featurizer: Featurizer, seed: int
) -> str:
    """Clone the rule `spec` into the policy of an SB3 model of kind PPO; returns the spec as tuned."""
    if is_tuned_rule(spec):
        spec = tuned_rule(spec, backend, requests, seed=seed)
    rng = np.random.default_rng(seed)
    seen, chosen = demonstrations(backend, requests, make_policy(spec, seed=seed), featurizer, backend.table, rng)
    vectors, labels = torch.from_numpy(seen), torch.from_numpy(chosen)
    optimiser = torch.optim.Adam(model.policy.parameters(), RATE)
    for _ in range(EPOCHS):
        for part in np.array_split(rng.permutation(len(seen)), max(1, len(seen) // BATCH)):
            logits = model.policy.get_distribution(vectors[part]).distribution.logits
            loss: Any = cross_entropy(logits, labels[part], label_smoothing=SMOOTHING)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return spec
