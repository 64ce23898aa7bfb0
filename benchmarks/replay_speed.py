"""Rounds per second of replay on one core: `python benchmarks/replay_speed.py`.

Prints the vectorised core (rounds alone), the vectorised environments (with observations and rewards), and the single
environment, over a synthetic trace. Seconds are CPU time of this process, so a busy machine does not matter.
Goals: 500,000 rounds/s for the core, 20,000 steps/s for the single environment.
"""

from __future__ import annotations

import argparse
from time import process_time as clock

import numpy as np

from assc.markov import MARKOV_COSTS, MarkovSource, markov_requests
from assc.vector_replay import GOING, FlatTrace, Rounds
from envs.replay import markov_env, replay_env
from envs.vector import ReplayVecEnv, ReplayVectorEnv


def core(flat: FlatTrace, lanes: int, seconds: float) -> float:
    """Rounds per second of `Rounds.play` with restarts, random actions."""
    rng = np.random.default_rng(0)
    rounds = Rounds(flat, rng.integers(0, len(flat.start), lanes))
    drafter, k = rng.integers(-1, 2, (32, lanes)), rng.integers(1, 17, (32, lanes))
    rows = rng.integers(0, len(flat.start), (32, lanes))
    played = 0
    start = clock()
    while clock() - start < seconds:
        for i in range(32):
            finish = rounds.play(drafter[i], k[i]).finish
            done = np.flatnonzero(finish != GOING)
            if len(done):
                rounds.restart(done, rows[i, done])
        played += 32 * lanes
    return played / (clock() - start)


def vector(env: ReplayVecEnv | ReplayVectorEnv, lanes: int, seconds: float) -> float:
    """Rounds per second of a vector environment, random actions."""
    actions = np.random.default_rng(0).integers(0, len(env.lanes.table), (32, lanes))
    env.reset()
    played = 0
    start = clock()
    while clock() - start < seconds:
        for i in range(32):
            env.step(actions[i])
        played += 32 * lanes
    return played / (clock() - start)


def single(env, seconds: float) -> float:  # type: ignore[no-untyped-def]
    """Steps per second of one environment, resets included."""
    actions = np.random.default_rng(0).integers(0, env.action_space.n, 4096).tolist()
    env.reset(seed=0)
    steps = 0
    start = clock()
    while clock() - start < seconds:
        for action in actions[:512]:
            done = env.step(action)
            steps += 1
            if done[2] or done[3]:
                env.reset()
    return steps / (clock() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    seconds = parser.parse_args().seconds
    trace = MarkovSource().trace(markov_requests(300))
    flat = FlatTrace(trace, MARKOV_COSTS)
    for lanes in (64, 256, 1024, 4096):
        print(f"core, {lanes:5d} lanes:            {core(flat, lanes, seconds):12,.0f} rounds/s")
    for lanes in (64, 256, 1024):
        for name, kind in (("Gymnasium", ReplayVectorEnv), ("SB3", ReplayVecEnv)):
            rate = vector(kind(trace, MARKOV_COSTS, lanes), lanes, seconds)
            print(f"{name + ',':10s} {lanes:5d} lanes:      {rate:12,.0f} rounds/s")
    one = single(replay_env(trace=trace, cost_model=MARKOV_COSTS), seconds)
    print(f"single, replay:                {one:12,.0f} steps/s")
    print(f"single, markov (draws texts):  {single(markov_env(), seconds):12,.0f} steps/s")


if __name__ == "__main__":
    main()
