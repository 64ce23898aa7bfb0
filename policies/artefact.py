"""Saved policies: one zip with `meta.json` and either `weights.npz` (a network) or `state.json` (any other policy).

`meta.json` holds `format`, `kind` ("ppo", "dqn", "a2c", "recurrent_ppo", or the spec of a registered policy such as
"bandit:ucb"), `features_version`, `history`, `fields`, `actions`, `versions` and whatever the trainer adds (`mode`,
`pair`, `training`, and `trained_on`: ids and content hashes of the prompts, also of those that an imitated policy had
learned from, by which eval.py keeps them out of results). Nothing is pickled, so reading a foreign file runs none of
it; every damage is one `ArtefactError`.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from assc.actions import ActionTable
from assc.core import Policy
from assc.errors import ArtefactError, AsscError
from assc.leakage import TrainedOn
from assc.observe import FEATURES_VERSION, HISTORY, Featurizer
from assc.registry import make_policy, register_artefact_loader
from assc.step_features import STEP_FEATURES_VERSION, Opening, StepFeaturizer
from assc.steps import Decision
from policies.artefact_checks import build_network, read_arrays, read_json, read_members, refuse
from policies.base import BasePolicy
from policies.learned import LearnedPolicy, Network
from policies.learned_steps import LearnedStepPolicy
from policies.recurrent import RecurrentNetwork, RecurrentPolicy

FORMAT = 1
NEURAL_KINDS = ("ppo", "a2c", "dqn", "recurrent_ppo")


@dataclass(frozen=True)
class Artefact:
    """A checked artefact: `network` and `featurizer` for neural kinds, else `spec` and `state`."""

    path: str
    meta: dict[str, Any]
    table: ActionTable
    featurizer: Featurizer | None = None
    network: Network | RecurrentNetwork | None = None
    opening: Opening | None = None
    """set where the network decides after each drafted token"""
    spec: str = ""
    state: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        return str(self.meta["kind"])


def save_network(
    path: str | os.PathLike[str],
    network: Network | RecurrentNetwork,
    *,
    kind: str,
    featurizer: Featurizer,
    table: ActionTable,
    meta: Mapping[str, Any] | None = None,
    opening: Opening | None = None,
) -> Path:
    """Save a network that maps `featurizer`'s vector to one score per action of `table`.

    With an `opening` it decides after each drafted token instead: from the vector of a `StepFeaturizer` over the same
    fields to one score per `assc.steps.Decision`; the table is then that of the opening.
    """
    head = network.head if isinstance(network, RecurrentNetwork) else network
    arrays: dict[str, Any] = {
        f"{n}{i}": a for i, pair in enumerate(head.layers) for n, a in zip("wb", pair, strict=True)
    }
    if isinstance(network, RecurrentNetwork):
        lstm = network.lstm
        arrays |= {"lstm_x": lstm.w_x, "lstm_h": lstm.w_h, "lstm_b": lstm.bias}
    if network.normaliser is not None:
        arrays |= {"mean": network.normaliser.mean, "var": network.normaliser.var}
        arrays |= {"eps": np.float64(network.normaliser.eps), "clip": np.float64(network.normaliser.clip)}
    description = _describe(kind, table, meta) | {
        "features_version": FEATURES_VERSION,
        "history": HISTORY,
        "fields": list(featurizer.fields),
        "activation": head.activation,
    }
    size, scores = featurizer.size, len(table)
    if opening is not None:
        size, scores = StepFeaturizer(featurizer.fields).size, len(Decision)
        description |= {"step_features_version": STEP_FEATURES_VERSION, "opening": opening.to_json()}
    build_network(str(path), arrays, head.activation, size, scores)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return _write(path, {"meta.json": _dump(description), "weights.npz": buffer.getvalue()})


def save_policy(
    path: str | os.PathLike[str],
    policy: Policy,
    *,
    table: ActionTable,
    meta: Mapping[str, Any] | None = None,
    spec: str | None = None,
) -> Path:
    """Save a registered policy with what it has learned; `spec` (default: its own) says how it is built again.

    Give `spec="bandit:ucb,frozen=true"` to deploy a learner that shall not go on learning.
    """
    spec = spec if spec is not None else policy.spec
    if not isinstance(make_policy(spec), BasePolicy) or spec.endswith(".zip"):
        raise ArtefactError(f"a policy is saved under the spec that builds it, got {spec!r}")
    state = {"spec": spec, "state": policy.state_dict()}
    kind = spec.partition("(")[0].partition(",")[0]
    return _write(path, {"meta.json": _dump(_describe(kind, table, meta)), "state.json": _dump(state)})


def read_artefact(path: str | os.PathLike[str]) -> Artefact:
    """Read and check a saved policy. Raises `ArtefactError` with one sentence for anything that is wrong with it."""
    name = os.fspath(path)
    members = read_members(name)
    meta = read_json(name, members, "meta.json")
    if meta.get("format") != FORMAT:
        refuse(name, f"has format {meta.get('format')!r}, this version of assc reads format {FORMAT}")
    kind = meta.get("kind")
    if not isinstance(kind, str) or not isinstance(meta.get("actions"), list):
        refuse(name, "has no kind or no action table in its meta.json")
    try:
        table = ActionTable.from_json(meta["actions"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        refuse(name, f"has an unreadable action table ({error})")
    if kind in NEURAL_KINDS:
        featurizer, opening = _featurizer(name, meta), _opening(name, meta, table)
        arrays = read_arrays(name, members)
        size, scores = featurizer.size, len(table)
        if opening is not None:
            size, scores = StepFeaturizer(featurizer.fields).size, len(Decision)
        network = build_network(name, arrays, meta.get("activation"), size, scores)
        if opening is not None and isinstance(network, RecurrentNetwork):
            refuse(name, "is recurrent and opens rounds, but a recurrent network decides once per round")
        return Artefact(name, meta, table, featurizer=featurizer, network=network, opening=opening)
    body = read_json(name, members, "state.json")
    spec, state = body.get("spec"), body.get("state")
    if not isinstance(spec, str) or not isinstance(state, dict) or spec.endswith(".zip"):
        refuse(name, "has no spec or no state in its state.json")
    return Artefact(name, meta, table, spec=spec, state=state)


def network_policy(
    network: Network | RecurrentNetwork,
    featurizer: Featurizer,
    table: ActionTable,
    opening: Opening | None = None,
    *,
    deterministic: bool = True,
    seed: int = 0,
) -> LearnedPolicy:
    """What plays a network: recurrent or not, once per round or (with an `opening`) after each drafted token."""
    options: dict[str, Any] = {"deterministic": deterministic, "seed": seed}
    if isinstance(network, RecurrentNetwork):
        return RecurrentPolicy(network, featurizer, table, **options)
    if opening is not None:
        return LearnedStepPolicy(network, StepFeaturizer(featurizer.fields), opening, **options)
    return LearnedPolicy(network, featurizer, table, **options)


def load_artefact(path: str | os.PathLike[str], *, deterministic: bool = True, seed: int = 0) -> BasePolicy:
    """The policy saved at `path`; its `spec` is the path, and `reset` returns to what was saved.

    `deterministic=False` samples the actions of a PPO or A2C network from a stream of its own, seeded by `seed`.
    """
    artefact = read_artefact(path)
    policy: BasePolicy
    if artefact.network is not None and artefact.featurizer is not None:
        if not deterministic and artefact.kind == "dqn":
            refuse(artefact.path, "is a DQN: its scores are values, not a distribution to sample from")
        parts = (artefact.network, artefact.featurizer, artefact.table, artefact.opening)
        policy = network_policy(*parts, deterministic=deterministic, seed=seed)
    else:
        try:
            built = make_policy(artefact.spec, seed=seed)
            built.load_state_dict(artefact.state or {})
        except (AsscError, TypeError, ValueError, KeyError) as error:
            refuse(artefact.path, f"cannot be restored: {error}")
        if not isinstance(built, BasePolicy):
            refuse(artefact.path, f"names {artefact.spec!r}, which is not a policy that can be saved")
        policy = built
    policy.spec = artefact.path
    policy.saved_table = artefact.table
    policy.trained_on = _trained_on(artefact)
    mode, c = artefact.meta.get("mode"), artefact.meta.get("c")
    policy.trained_mode = mode if isinstance(mode, str) else None
    policy.trained_c = float(c) if isinstance(c, int | float) else None
    policy.mark_initial()
    return policy


def _trained_on(artefact: Artefact) -> TrainedOn | None:
    if "trained_on" not in artefact.meta:
        return None
    try:
        return TrainedOn.from_json(artefact.meta["trained_on"])
    except ValueError as error:
        refuse(artefact.path, f"has an unreadable list of training prompts ({error})")


def package_versions(*names: str) -> dict[str, str]:
    """Installed versions of `names`, those that are not installed left out."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _featurizer(name: str, meta: Mapping[str, Any]) -> Featurizer:
    found = (meta.get("features_version"), meta.get("history"))
    if found != (FEATURES_VERSION, HISTORY):
        refuse(
            name,
            f"was made for observation features version {found[0]!r} with {found[1]!r} rounds of history, this version "
            f"of assc has version {FEATURES_VERSION} with {HISTORY}",
        )
    fields = meta.get("fields")
    if not isinstance(fields, list) or not all(isinstance(f, str) for f in fields):
        refuse(name, "has no list of observation fields in its meta.json")
    try:
        return Featurizer(fields)
    except ArtefactError as error:
        refuse(name, f"cannot be used: {error}")


def _opening(name: str, meta: Mapping[str, Any], table: ActionTable) -> Opening | None:
    """How a network that decides per draft token opens its rounds; None for one that decides per round."""
    if "opening" not in meta:
        return None
    found = meta.get("step_features_version")
    if found != STEP_FEATURES_VERSION:
        refuse(
            name,
            f"was made for version {found!r} of the numbers per draft token, this version of assc has version "
            f"{STEP_FEATURES_VERSION}",
        )
    try:
        opening = Opening(**meta["opening"])
        if opening.table != table:
            refuse(name, "opens rounds with other actions than those of its table")
    except (TypeError, ValueError):
        refuse(name, "does not say how it opens a round")
    return opening


def _describe(kind: str, table: ActionTable, meta: Mapping[str, Any] | None) -> dict[str, Any]:
    extra = dict(meta or {})
    versions = package_versions("assc", "numpy") | dict(extra.pop("versions", {}))
    description = {"format": FORMAT, "kind": kind, "actions": table.to_json(), "versions": versions}
    own = {"features_version", "history", "fields", "activation", "step_features_version", "opening"}
    reserved = {*description, *own} & set(extra)
    if reserved:
        raise ValueError(f"meta may not set {sorted(reserved)}")
    return description | extra


def _dump(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _write(path: str | os.PathLike[str], members: Mapping[str, bytes]) -> Path:
    """Write the zip beside its place, then move it there: a crash leaves the old file or the new one, never half."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for name, content in members.items():
                    archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise ArtefactError(f"the policy cannot be saved at {str(target)!r}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


register_artefact_loader(load_artefact)
