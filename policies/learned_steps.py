"""A network trained on decisions per draft token, in the engine: numpy only, no SB3, no torch."""

from __future__ import annotations

from assc.core import ROLLBACK, Action, Observation
from assc.step_features import Opening, StepFeaturizer
from assc.steps import Decision, StepObservation
from policies.learned import LearnedPolicy, Network


class LearnedStepPolicy(LearnedPolicy):
    """Asks a saved network when a round begins and after each drafted token, as `envs.draft_step.DraftStepEnv` did.

    Continue at the beginning opens the round as `opening` says, anything else decodes one token plainly.

    Uses the observation fields listed in its artefact and the draft's confidences. Source: as `LearnedPolicy`.

    >>> import numpy as np
    >>> featurizer = StepFeaturizer(["temperature"])
    >>> bias = np.array([1.0, 0.0, 0.0], np.float32)
    >>> network = Network([(np.zeros((3, featurizer.size), np.float32), bias)], "tanh")
    >>> policy = LearnedStepPolicy(network, featurizer, Opening("model", 8))
    >>> class Seen: k_max, temperature, past = 5, 0.0, ()
    >>> str(policy.act(Seen))
    'model:5'
    """

    def __init__(
        self,
        network: Network,
        featurizer: StepFeaturizer,
        opening: Opening,
        *,
        deterministic: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(network, featurizer.round, opening.table, deterministic=deterministic, seed=seed)
        self.step_featurizer, self.opening = featurizer, opening
        self.needs = featurizer.needs | opening.needs

    def act(self, observation: Observation) -> Action:
        go_on = self.choose(self.network(self.step_featurizer(observation))) == Decision.CONTINUE
        return self.opening.action(observation) if go_on else ROLLBACK

    def decide(self, step: StepObservation) -> Decision:
        return Decision(self.choose(self.network(self.step_featurizer(step.observation, step))))
