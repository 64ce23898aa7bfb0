"""Gymnasium environments over a decoding backend. Importing this package registers the environment ids."""

from __future__ import annotations

import gymnasium as gym

from envs.decode import SpecDecodeEnv
from envs.draft_step import DraftStepEnv
from envs.live import live_env
from envs.rewards import REWARDS, make_reward
from envs.sources import RequestSource

LIVE_ID = "assc/SpecDecode-Live-v0"
"""live models, modelled seconds: the same actions give the same rewards"""

LIVE_MEASURED_ID = "assc/SpecDecode-LiveMeasured-v0"
"""live models, measured seconds"""

REPLAY_ID = "assc/SpecDecode-Replay-v0"
"""a recorded trace, modelled seconds"""

MARKOV_ID = "assc/SpecDecode-Markov-v0"
"""a synthetic source with hidden regimes, modelled seconds"""

STEP_LIVE_ID = "assc/DraftStep-Live-v0"
"""a decision after each drafted token; live models, modelled seconds"""

STEP_REPLAY_ID = "assc/DraftStep-Replay-v0"
"""a decision after each drafted token; a recorded trace with confidences per draft step"""

__all__ = [
    "LIVE_ID",
    "LIVE_MEASURED_ID",
    "MARKOV_ID",
    "REPLAY_ID",
    "REWARDS",
    "STEP_LIVE_ID",
    "STEP_REPLAY_ID",
    "DraftStepEnv",
    "RequestSource",
    "SpecDecodeEnv",
    "live_env",
    "make_reward",
    "register_envs",
]


def register_envs() -> None:
    """Register the ids with Gymnasium; calling it again changes nothing."""
    for env_id, time_source in ((LIVE_ID, "modelled"), (LIVE_MEASURED_ID, "measured")):
        if env_id not in gym.registry:
            gym.register(
                id=env_id,
                entry_point="envs.live:live_env",
                nondeterministic=time_source == "measured",
                kwargs={"time_source": time_source},
            )
    for env_id, entry in (
        (REPLAY_ID, "envs.replay:replay_env"),
        (MARKOV_ID, "envs.replay:markov_env"),
        (STEP_LIVE_ID, "envs.live:live_step_env"),
        (STEP_REPLAY_ID, "envs.replay:replay_step_env"),
    ):
        if env_id not in gym.registry:
            gym.register(id=env_id, entry_point=entry)


register_envs()
