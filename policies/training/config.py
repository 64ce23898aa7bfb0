"""The configuration of a training run: what the command line can say, what is checked, what is written down."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from assc.core import MODES, Mode
from assc.errors import ArtefactError, AsscError, RequestError, SpecError
from assc.files import git_commit, versions, write_json
from assc.groups import check_k_max
from assc.registry import make_policy
from envs.rewards import REWARDS
from policies.training.imitated import untuned
from policies.training.settings import parse_settings

STEP_ALGORITHMS = ("ppo", "dqn", "a2c")
"""learners that can decide after each drafted token"""
SB3_ALGORITHMS = (*STEP_ALGORITHMS, "recurrent_ppo")
ONLINE_LEARNERS = ("bandit", "linucb", "lints", "accept_model", "mdp", "survival", "specdecpp")
FITTED = "accept_stop"
"""fitted to what a trace says of every action"""
CONFIG_FILE = "config.json"
DESCRIPTION = "Train a policy that chooses K round by round, then compare it with baselines on held-out prompts."
FREE_ON_RESUME = frozenset(
    {"total_timesteps", "resume", "run_dir", "cost", "threads", "device", "eval_requests", "eval_max_new_tokens"}
    | {"checkpoint_every", "progress", "live_check", "live_requests", "seeds", "jobs", "sweep", "sweep_timesteps"}
    | {"curve_every", "curve_requests"}
)
"""fields that a resumed run may change; the others decide what is learned and stay as they were"""
LIVE_ONLY = ("target", "draft", "mode", "temperature", "max_new_tokens", "k_max", "time_source", "workload")
"""fields that a trace decides"""
LIVE_ROUNDS, REPLAY_ROUNDS, FIT_ROUNDS = 3000, 200_000, 24_000
LIVE_EVAL_REQUESTS = 16


def require_recurrent() -> None:
    """`AsscError` where sb3-contrib is not installed."""
    if find_spec("sb3_contrib") is None:
        raise AsscError("recurrent_ppo needs the package sb3-contrib: pip install 'assc[recurrent]'")


@dataclass
class TrainConfig:
    """What a training run does; every field is a flag of `train_policy.py`."""

    algo: str = "ppo"
    """Learner: ppo, dqn, a2c, recurrent_ppo (needs the extra 'recurrent'), or the spec of an online learner as
    bandit:ucb, linucb, lints, accept_model, mdp, survival, specdecpp (per draft token; learns from the trace first); or
    accept_stop, fitted to a trace with confidences per draft step."""
    granularity: Literal["round", "step"] = "round"
    """When to decide: before each round (which drafter and K), or after each drafted token (ppo, a2c, dqn)."""
    copy_from: int = 0
    """step: above 0, rounds whose last so many tokens have occurred before are drafted by the lookup; 0: never."""
    backend: Literal["replay", "live"] = "replay"
    """What plays the rounds: replay of a recorded trace in modelled time (no model is needed), or live models."""
    traces: str | None = None
    """replay: trace, a .npz file or a folder; default: the one that comes with the package."""
    cost: Path | None = None
    """Cost model of the rounds; default: replay: the package's, live: fitted in a short calibration."""
    peek: bool = False
    """Observe the draft's entropy and top-1 before each decision; its forward is paid for."""
    pair: str = "smollm2"
    """Named pair of target and drafters (python -m assc doctor lists them); with replay for the live check only."""
    target: str | None = None
    """live: target model (directory or hub name) instead of the pair's."""
    draft: tuple[str, ...] = ()
    """live: drafts added to the pair's: directory or hub name of a model, folder of a learned draft, or NAME=SOURCE."""
    workload: str = "mixed"
    """live: packaged workload or a JSONL file with prompts; its train part is trained on, its held-out part evaluated
    on."""
    total_timesteps: int | None = None
    """Decoding rounds to train for; ppo and a2c finish the rollout they are in. Default: replay 200,000
    (accept_stop 24,000), live 3,000."""
    run_dir: Path | None = None
    """Where to write; a new directory. Default: runs/<algo>-<pair>-<time>."""
    seed: int = 0
    """Seed of everything that is random: network, exploration, order of requests, their tokens."""
    resume: Path | None = None
    """Run directory to continue; its configuration is kept, only more steps and output options may be given."""
    seeds: tuple[int, ...] = ()
    """Train these seeds instead of one, each in a process and a folder of its own, and summarise them."""
    jobs: int | None = None
    """Processes of --seeds at once; default: as many as there are cores."""
    set: tuple[str, ...] = ()
    """Hyperparameters of the learner as NAME=VALUE, for example gamma=0.3 net_arch=64,64; see docs/training.md."""
    sweep: int | None = None
    """replay: first try this many settings on a part of the train requests (needs the extra 'sweep'); the best is then
    trained on all of them and compared on held-out ones."""
    sweep_timesteps: int | None = None
    """Decoding rounds of each trial of the sweep; default: those of the run."""
    imitate: str | None = None
    """replay, ppo per round: rule that the network first learns to decide like (NAME:tuned is tuned on the train
    requests), none for a random beginning; default: cascade:tuned where the trace has a lookup and a model."""
    reward: str = "dinkelbach"
    """Reward of one round: dinkelbach, saved or throughput."""
    mode: Mode = "greedy"
    """live: verification mode: greedy, rejection or gumbel."""
    temperature: float | None = None
    """live: sampling temperature; default: 0 for greedy, 1 for gumbel and rejection."""
    max_new_tokens: int = 64
    """live: tokens per training request."""
    k_max: int = 16
    """live: largest K of the action table."""
    threads: int | None = None
    """Threads of the tensor library; default: as it finds the machine."""
    device: str = "auto"
    """Device of the models (the learner itself runs on the CPU); auto is cuda if there is one, else cpu."""
    dtype: str = "auto"
    """Number format of the models: float64, float32, bfloat16, float16; auto chooses per device."""
    time_source: Literal["modelled", "measured"] = "modelled"
    """live: seconds that training sees: modelled (fitted in a short calibration; free of noise, so equal seeds give
    equal policies) or measured. The evaluation of a live run is always measured."""
    checkpoint_every: int | None = None
    """Rounds between checkpoints; default: replay 40,960, live 256."""
    eval_requests: int | None = None
    """Held-out requests of the comparison afterwards, the same for every seed; 0 skips it. Default: replay all, live
    16."""
    eval_max_new_tokens: int = 48
    """live: tokens per request of the comparison."""
    live_check: bool = False
    """replay: afterwards play the policy on the live decoder as well and compare with the replay, even if the models
    must be fetched first; without it, this is done where they are on the machine."""
    live_requests: int = 3
    """replay: held-out requests of that check; 0 skips it."""
    curve_every: int | None = None
    """Rounds between the points of the TensorBoard curves that set the policy against its baselines; 0 for none.
    Default: replay a twentieth of the run (1,024 at least), live 0, since every point is decoded."""
    curve_requests: int = 24
    """Train requests that are played for each point of these curves."""
    progress: Annotated[bool, tyro.conf.FlagConversionOff] = True
    """Show a progress bar."""

    def check(self) -> None:
        """Raise an `AsscError` of one sentence if a value cannot work."""
        from assc.device import check_threads

        named = (*ONLINE_LEARNERS, FITTED)
        by_spec = self.algo.partition(":")[0] in named
        if self.algo not in SB3_ALGORITHMS and not by_spec:
            raise SpecError(f"unknown algorithm {self.algo!r}; known: {', '.join((*SB3_ALGORITHMS, *named))}")
        if by_spec:
            make_policy(self.algo)
        if self.fitted and (self.backend == "live" or self.sweep is not None):
            raise RequestError(f"{FITTED} is fitted to a trace, without --sweep and --backend live")
        parse_settings(self.algo, self.set)
        self._check_many()
        if self.algo == "recurrent_ppo":
            require_recurrent()
        if self.granularity == "step" and self.algo not in STEP_ALGORITHMS:
            raise RequestError(f"--granularity step is for {', '.join(STEP_ALGORITHMS)}, {self.algo} decides per round")
        if self.copy_from < 0 or (self.copy_from and self.granularity == "round"):
            raise RequestError("--copy-from is 0 or more, and above 0 for --granularity step only")
        if self.imitate is not None:
            if self.algo != "ppo" or self.granularity != "round" or self.backend != "replay":
                raise RequestError("--imitate is for --algo ppo with --backend replay and --granularity round")
            if self.imitate != "none":
                untuned(self.imitate)
        least = 2 if self.algo in ("ppo", "recurrent_ppo") else 1
        if self.rounds < least:
            why = f" ({self.algo} normalises over a batch, so it needs two)" if least == 2 else ""
            raise RequestError(f"--total-timesteps is at least {least}{why}, got {self.total_timesteps}")
        self._check_backend()
        if self.reward not in REWARDS:
            raise SpecError(f"unknown reward {self.reward!r}; known rewards: {', '.join(REWARDS)}")
        if self.mode not in MODES:
            raise SpecError(f"unknown mode {self.mode!r}; known modes: {', '.join(MODES)}")
        for name, smallest in (
            ("max_new_tokens", 1),
            ("checkpoint_every", 1),
            ("eval_requests", 0),
            ("eval_max_new_tokens", 1),
            ("live_requests", 0),
            ("curve_every", 0),
            ("curve_requests", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise RequestError(f"{_flag(name)} is at least {smallest}, got {value}")
        check_k_max(self.k_max)
        if self.seed >= 2**32:
            raise RequestError(f"--seed is at most {2**32 - 1}, got {self.seed}")
        check_threads(self.threads)
        if not 0 <= self.sampling_temperature < math.inf:
            raise RequestError(f"--temperature is at least 0, got {self.temperature}")
        if self.mode == "greedy" and self.sampling_temperature > 0:
            raise RequestError("--temperature above 0 needs --mode gumbel or --mode rejection; greedy is temperature 0")

    def _check_many(self) -> None:
        """Refuse what cannot be for several seeds or a sweep."""
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds, default=0) < 0:
            raise RequestError(f"--seeds are different numbers of 0 or more, got {' '.join(map(str, self.seeds))}")
        if self.jobs is not None and (self.jobs < 1 or not self.seeds):
            raise RequestError(f"--jobs is 1 or more and goes with --seeds, got {self.jobs}")
        if self.sweep is not None and (self.sweep < 1 or self.backend != "replay"):
            raise RequestError(f"--sweep is 1 or more and needs --backend replay, got {self.sweep}")
        if self.sweep_timesteps is not None and (self.sweep_timesteps < 2 or self.sweep is None):
            raise RequestError(f"--sweep-timesteps is 2 or more and goes with --sweep, got {self.sweep_timesteps}")

    def _check_backend(self) -> None:
        """Refuse options that the other backend alone reads."""
        if self.backend == "live":
            strange = [name for name in ("traces", "live_check") if getattr(self, name)]
            if strange:
                raise RequestError(f"{_flag(strange[0])} is for --backend replay, this run is live")
            return
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name in LIVE_ONLY:
            if getattr(self, name) != defaults[name]:
                raise RequestError(f"{_flag(name)} is decided by the trace; with --backend live it can be chosen")

    @property
    def unit(self) -> str:
        """What `rounds` counts: with --granularity step each decision after a drafted token."""
        return "decision" if self.granularity == "step" else "round"

    @property
    def rounds(self) -> int:
        """Rounds (or decisions, see `unit`) to train for."""
        if self.total_timesteps is not None:
            return self.total_timesteps
        if self.fitted:
            return FIT_ROUNDS
        return LIVE_ROUNDS if self.backend == "live" else REPLAY_ROUNDS

    @property
    def fitted(self) -> bool:
        """Whether the learner is fitted to the trace instead of playing alone."""
        return self.algo.partition(":")[0] == FITTED

    @property
    def checkpoint_rounds(self) -> int:
        """Rounds between checkpoints."""
        return self.checkpoint_every or (256 if self.backend == "live" else 40_960)

    @property
    def curve_name(self) -> str:
        """The trained policy in TensorBoard, apart from an online learner of that name among the baselines."""
        return self.algo if self.algo in SB3_ALGORITHMS else f"{self.algo} trained"

    @property
    def curve_rounds(self) -> int:
        """Rounds between the points of the curves against baselines, 0 for none."""
        if self.curve_every is not None:
            return self.curve_every
        return 0 if self.backend == "live" else max(1024, self.rounds // 20)

    @property
    def sampling_temperature(self) -> float:
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.mode == "greedy" else 1.0

    def to_json(self) -> dict[str, Any]:
        return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self).items()}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def config_from_json(values: dict[str, Any]) -> TrainConfig:
    """The inverse of `TrainConfig.to_json`."""
    known = {f.name for f in dataclasses.fields(TrainConfig)}
    if unknown := set(values) - known:
        raise ArtefactError(f"the run's {CONFIG_FILE} has unknown fields {sorted(unknown)}; it is of another version")
    values = {k: tuple(v) if k in ("seeds", "set") else v for k, v in values.items()}
    paths = {k: Path(values[k]) for k in ("run_dir", "resume", "cost") if values.get(k) is not None}
    draft = values.get("draft") or ()  # one name or none in older runs
    return TrainConfig(**{**values, **paths, "draft": (draft,) if isinstance(draft, str) else tuple(draft)})


def stored_config(run_dir: Path) -> TrainConfig:
    """The configuration that a run directory was started with."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ArtefactError(f"{run_dir} cannot be resumed: it has no {CONFIG_FILE}, so it is not a training run")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["config"]
        return config_from_json(values)
    except (ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"{path} is damaged: {error}") from None


def merge_resumed(given: TrainConfig, words: Sequence[str]) -> TrainConfig:
    """For a command line with `--resume`: the run's own configuration, changed by the flags that were written.

    `words` is the command line, since a flag that repeats its default is a statement as well.
    """
    if given.resume is None:
        return given
    written = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    names = {f.name for f in dataclasses.fields(TrainConfig)} & written
    return replace(stored_config(given.resume), run_dir=None, **{name: getattr(given, name) for name in names})


def check_resumable(given: TrainConfig, stored: TrainConfig) -> None:
    """Refuse a resumed run that would learn something else than the run it continues."""
    for field in dataclasses.fields(TrainConfig):
        before, now = getattr(stored, field.name), getattr(given, field.name)
        if field.name not in FREE_ON_RESUME and before != now:
            flag = _flag(field.name)
            raise RequestError(f"--resume keeps {flag} {before} of the run; start a new run for {flag} {now}")


def write_config(config: TrainConfig, run_dir: Path, extra: dict[str, Any]) -> None:
    """Write the resolved configuration with versions and commit."""
    content = {"config": config.to_json(), "versions": versions(), "git_commit": git_commit(), **extra}
    write_json(run_dir / CONFIG_FILE, content)
