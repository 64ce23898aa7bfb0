"""Hyperparameters that `--set` may change, and where a sweep looks for better ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from assc.errors import SpecError

SHARED = ("learning_rate", "gamma", "net_arch")
ON_POLICY = (*SHARED, "gae_lambda", "ent_coef", "vf_coef")
SETTABLE: dict[str, tuple[str, ...]] = {
    "ppo": (*ON_POLICY, "n_epochs", "batch_size", "clip_range"),
    "recurrent_ppo": (*ON_POLICY, "n_epochs", "batch_size", "clip_range", "lstm_hidden_size"),
    "a2c": ON_POLICY,
    "dqn": (*SHARED, "batch_size", "target_update_interval", "exploration_fraction"),
}
"""per learner of stable-baselines3; online learners have theirs in the spec (`bandit:ucb,discount=0.99`)"""
WHOLE = ("n_epochs", "batch_size", "target_update_interval", "lstm_hidden_size")


def parse_settings(algo: str, words: Sequence[str]) -> dict[str, Any]:
    """Values of `name=value` words. `SpecError` for a name that the learner does not have, or a value that is none.

    >>> parse_settings("ppo", ["gamma=0.3", "net_arch=64,32"])
    {'gamma': 0.3, 'net_arch': [64, 32]}
    """
    known = SETTABLE.get(algo)
    if words and known is None:
        raise SpecError(f"--set is for {', '.join(SETTABLE)}; the keys of {algo!r} are written into --algo")
    found: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if known is None or name not in known or not sign:
            raise SpecError(f"--set {word!r} is not NAME=VALUE with a name of: {', '.join(known or ())}")
        try:
            value: Any = [int(n) for n in text.split(",")] if name == "net_arch" else float(text)
            if name in WHOLE:
                value = int(text)
        except ValueError:
            kind = "whole numbers with commas" if name == "net_arch" else "a number"
            raise SpecError(f"--set {word!r}: {name} is {'a whole number' if name in WHOLE else kind}") from None
        least, most = _bounds(name)
        if any(not least <= v <= most for v in (value if isinstance(value, list) else [value])):
            raise SpecError(f"--set {word!r}: {name} is in {least:g} to {most:g}")
        found[name] = value
    return found


def _bounds(name: str) -> tuple[float, float]:
    if name in ("gamma", "gae_lambda", "exploration_fraction", "clip_range"):
        return (0.0 if name in ("gamma", "gae_lambda") else 1e-3), 1.0
    if name in ("ent_coef", "vf_coef"):
        return 0.0, 10.0
    return (1e-7, 1.0) if name == "learning_rate" else (1, 1_000_000)


Trial = Any
"""an `optuna.Trial`"""


def _network(trial: Trial) -> dict[str, Any]:
    width = trial.suggest_categorical("width", [32, 64, 128])
    return {
        "learning_rate": trial.suggest_float("learning_rate", 2e-4, 5e-3, log=True),
        "gamma": trial.suggest_categorical("gamma", [0.0, 0.1, 0.3, 0.6, 0.9, 0.98]),
        "net_arch": f"{width},{width}",
    }


def _on_policy(trial: Trial) -> dict[str, Any]:
    return _network(trial) | {
        "gae_lambda": trial.suggest_float("gae_lambda", 0.0, 1.0),
        "ent_coef": trial.suggest_float("ent_coef", 1e-3, 0.3, log=True),
    }


def _ppo(trial: Trial) -> dict[str, Any]:
    return _on_policy(trial) | {"n_epochs": trial.suggest_int("n_epochs", 3, 15)}


def _dqn(trial: Trial) -> dict[str, Any]:
    return _network(trial) | {"exploration_fraction": trial.suggest_float("exploration_fraction", 0.1, 0.6)}


SPACES: dict[str, Callable[[Trial], dict[str, Any]]] = {
    "ppo": _ppo,
    "recurrent_ppo": _ppo,
    "a2c": _on_policy,
    "dqn": _dqn,
    "bandit": lambda t: {"discount": t.suggest_categorical("discount", [1.0, 0.999, 0.99, 0.97, 0.95])},
    "linucb": lambda t: {
        "explore": t.suggest_float("explore", 0.03, 3.0, log=True),
        "ridge": t.suggest_float("ridge", 0.1, 30.0, log=True),
    },
    "lints": lambda t: {
        "explore": t.suggest_float("explore", 0.03, 3.0, log=True),
        "ridge": t.suggest_float("ridge", 0.1, 30.0, log=True),
    },
    "accept_model": lambda t: {
        "rate": t.suggest_float("rate", 0.003, 0.3, log=True),
        "every": t.suggest_categorical("every", [8, 16, 32, 64]),
        "probe": t.suggest_categorical("probe", [2, 4, 8, 16]),
    },
    "specdecpp": lambda t: {
        "tau": t.suggest_float("tau", 0.2, 0.95),
        "least": t.suggest_categorical("least", [1, 2]),
        "m": t.suggest_categorical("m", [0, 2, 3, 4]),
    },
    "survival": lambda t: {
        "discount": t.suggest_categorical("discount", [0.95, 0.97, 0.98, 0.99, 0.995]),
        "explore": t.suggest_float("explore", 0.0, 1.0),
        "memory": t.suggest_categorical("memory", [0.95, 0.98, 0.99, 0.995, 0.998]),
    },
    "mdp": lambda t: {
        "gamma": t.suggest_categorical("gamma", [0.0, 0.3, 0.6, 0.9]),
        "memory": t.suggest_categorical("memory", [0.8, 0.9, 0.95, 0.99]),
    },
}
"""learner -> hyperparameters of one trial of a sweep"""


def with_settings(algo: str, words: tuple[str, ...], values: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """`--algo` and `--set` with the values of a trial; what the user has fixed stays.

    >>> with_settings("ppo", ("gamma=0.5",), {"gamma": 0.1, "n_epochs": 5})
    ('ppo', ('gamma=0.5', 'n_epochs=5'))
    >>> with_settings("bandit:ucb", (), {"discount": 0.99})
    ('bandit:ucb,discount=0.99', ())
    """
    texts = {name: v if isinstance(v, str) else f"{v:.6g}" for name, v in values.items()}
    if algo in SETTABLE:
        fixed = {word.partition("=")[0] for word in words}
        return algo, (*words, *(f"{n}={v}" for n, v in texts.items() if n not in fixed))
    fixed = {part.partition("=")[0] for part in algo.replace(":", ",").split(",")}
    for name, value in texts.items():
        if name not in fixed:
            algo += f"{',' if ':' in algo else ':'}{name}={value}"
    return algo, words
