"""The counter-based noise: uniform, independent over every key, the same whatever was drawn before.

Statistical bounds: each statistic is a z-score or a p-value with odds below 1e-6 of a false alarm if the numbers were
ideal; the keys are fixed, so a pass stays a pass until the generator changes.
"""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from assc.sampling import STREAMS, Noise, to_gumbel

N = 20_000
SERIES = {
    "ids": lambda: Noise(3, N).uniform(Noise(3, N).key("target", 17)).numpy(),
    "positions": lambda: np.array([Noise(3, 1).scalar("accept", t) for t in range(N)]),
    "seeds": lambda: np.array([Noise(s, 1).scalar("accept", 5) for s in range(N)]),
    "salts": lambda: np.array([Noise(3, 1).scalar("draft", 5, salt) for salt in range(N)]),
}
"""the same generator, walked along each of its coordinates"""


@pytest.mark.parametrize("along", SERIES)
def test_uniform_and_without_serial_correlation(along: str) -> None:
    u = SERIES[along]()
    assert stats.kstest(u, "uniform").pvalue > 1e-6
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) * np.sqrt(N) < 5
    cells, *_ = np.histogram2d(u[::2], u[1::2], bins=16, range=((0, 1), (0, 1)))
    assert stats.chisquare(cells.ravel()).pvalue > 1e-6
    low_bits = (u * 2**52).astype(np.uint64) & np.uint64(15)
    assert stats.chisquare(np.bincount(low_bits.astype(int), minlength=16)).pvalue > 1e-6


def test_independent_across_streams_positions_salts_and_seeds() -> None:
    """Neighbouring keys give unrelated vectors: all pairs of 24 keys, correlation and common values."""
    keys = [(seed, s, t, salt) for seed in (0, 1) for s in STREAMS for t, salt in ((4, 0), (5, 0), (4, 1))]
    rows = np.stack([Noise(k[0], N).uniform(Noise(k[0], 1).key(*k[1:])).numpy() for k in keys])
    z = (np.corrcoef(rows) - np.eye(len(keys))) * np.sqrt(N)
    assert np.abs(z).max() < 6  # 276 pairs
    assert len(np.unique(rows)) == rows.size  # no shifted copy of a vector inside another


def test_keys_of_a_long_run_are_distinct() -> None:
    found = {
        Noise(seed, 1).key(stream, position, salt)
        for seed in (0, 1, 2, -1, 2**40, 2**63)
        for stream in STREAMS
        for position in range(200)
        for salt in range(10)
    }
    assert len(found) == 6 * len(STREAMS) * 200 * 10


def test_matches_the_published_splitmix64_vector() -> None:
    """Outputs of splitmix64 with state 1234567 (Vigna's reference code), of which 52 bits are kept."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    expected = [((x >> 12) + 0.5) * 2.0**-52 for x in outputs]
    assert Noise(0, 6).uniform(1234567)[1:].tolist() == expected


def test_scalar_is_the_first_of_the_vector_and_keys_make_the_rows() -> None:
    for seed in (0, 7, -3, 2**62):
        noise = Noise(seed, 5)
        for stream in STREAMS:
            vectors = noise.uniform(noise.keys(stream, range(50), 3))
            for t in range(50):
                alone = noise.uniform(noise.key(stream, t, 3))
                assert torch.equal(alone, vectors[t])
                assert noise.scalar(stream, t, 3) == alone[0].item()
                assert torch.equal(noise.gumbel(stream, t, 3), to_gumbel(alone.clone()))


def test_numbers_stay_inside_the_open_interval() -> None:
    ends = torch.tensor([0.5 * 2.0**-52, (2**52 - 0.5) * 2.0**-52], dtype=torch.float64)
    assert 0 < ends[0] and ends[1] < 1
    assert torch.isfinite(to_gumbel(ends)).all()


def test_gumbel_noise_is_gumbel_and_its_maximum_samples_softmax() -> None:
    g = Noise(8, N).gumbel("target", 0).numpy()
    assert stats.kstest(g, stats.gumbel_r.cdf).pvalue > 1e-6
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5]).double()
    noise = Noise(9, 5)
    g = to_gumbel(noise.uniform(noise.keys("target", range(N))))
    counts = np.bincount((logits + g).argmax(-1).numpy(), minlength=5)
    assert stats.chisquare(counts, N * logits.softmax(-1).numpy()).pvalue > 1e-6


def test_v01_draws_depend_on_keys_alone_and_leave_global_generators_alone() -> None:
    state, np_state, py_state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[union-attr]
    first, second = Noise(4, 64), Noise(4, 64)
    forward = [first.gumbel("target", t) for t in range(8)]
    torch.manual_seed(99)
    torch.set_rng_state(state)
    backward = [second.gumbel("target", t) for t in reversed(range(8))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    assert not any(torch.equal(a, b) for a, b in pairwise(forward))
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == np_state).all() and random.getstate() == py_state


def test_a_smaller_vocabulary_sees_the_same_numbers() -> None:
    """The noise is indexed by token id, so a trimmed draft vocabulary gathers its own entries."""
    assert torch.equal(Noise(5, 40).gumbel("target", 3), Noise(5, 98).gumbel("target", 3)[:40])


def test_kept_noise_is_dropped_when_its_position_is_committed() -> None:
    noise = Noise(5, 8)
    before = noise.gumbel("target", 3)
    assert noise.gumbel("target", 3) is before
    noise.forget(4)
    assert noise._cached == {}
    assert torch.equal(noise.gumbel("target", 3), before)
