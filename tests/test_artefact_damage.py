"""Damaged, foreign and outdated artefacts: one readable sentence each, never a traceback of something else (B14)."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_artefact import FEATURIZER, TABLE, observations, picks, random_network

from assc.errors import ArtefactError
from assc.registry import make_policy
from policies.artefact import load_artefact, save_network, save_policy


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_network(tmp_path / "policy.zip", random_network(), kind="ppo", featurizer=FEATURIZER, table=TABLE)


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """Copy the members of a zip through `change`."""
    with zipfile.ZipFile(path) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def meta(**changes: Any) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        value = json.loads(members["meta.json"]) | changes
        members["meta.json"] = json.dumps({k: v for k, v in value.items() if v != "drop"}).encode()

    return change


def weights(edit: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        arrays = dict(np.load(io.BytesIO(members["weights.npz"])))
        edit(arrays)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        members["weights.npz"] = buffer.getvalue()

    return change


def put(name: str, index: Any, value: float) -> Callable[[dict[str, Any]], None]:
    def edit(arrays: dict[str, Any]) -> None:
        array = np.array(arrays[name])
        array[index] = value
        arrays[name] = array

    return edit


CORRUPTIONS: dict[str, tuple[Callable[[dict[str, bytes]], None], str]] = {
    "no meta": (lambda m: m.pop("meta.json") and None, "no meta.json"),
    "no weights": (lambda m: m.pop("weights.npz") and None, "no weights.npz"),
    "meta is not json": (lambda m: m.update({"meta.json": b"{"}), "unreadable meta.json"),
    "meta is not utf-8": (lambda m: m.update({"meta.json": b"\xff\xfe\x00"}), "unreadable meta.json"),
    "meta is a list": (lambda m: m.update({"meta.json": b"[]"}), "not a JSON object"),
    "meta is deep": (lambda m: m.update({"meta.json": b"[" * 100_000}), "unreadable meta.json"),
    "meta has NaN": (lambda m: m.update({"meta.json": b'{"format": NaN}'}), "unreadable meta.json"),
    "format": (meta(format=99), "format 99"),
    "no format": (meta(format="drop"), "format None"),
    "features version": (meta(features_version=0), "features version 0"),
    "history": (meta(history=9), "9 rounds of history"),
    "unknown kind": (meta(kind="magic"), "no state.json"),
    "no kind": (meta(kind="drop"), "no kind"),
    "unknown field": (meta(fields=["acceptance_ema", "crystal_ball"]), "crystal_ball"),
    "no fields": (meta(fields="drop"), "no list of observation fields"),
    "other fields": (meta(fields=["acceptance_ema"]), "inputs were expected"),
    "actions": (meta(actions=[{"drafter": "ngram", "k": 4}]), "unreadable action table"),
    "actions of text": (meta(actions=["x"]), "unreadable action table"),
    "fewer actions": (meta(actions=TABLE.to_json()[:-1]), "9 outputs for 8 actions"),
    "activation": (meta(activation="swish"), "swish"),
    "weights are not npz": (lambda m: m.update({"weights.npz": b"PK\x03\x04nonsense"}), "unreadable weights.npz"),
    "weights are an npy": (lambda m: m.update({"weights.npz": npy(np.zeros(3))}), "unreadable weights.npz"),
    "NaN": (weights(put("w1", (0, 0), np.nan)), "NaN or infinite"),
    "infinite mean": (weights(put("mean", 0, np.inf)), "NaN or infinite"),
    "negative variance": (weights(put("var", 0, -1)), "negative variance"),
    "no bias": (weights(lambda a: a.pop("b1") is None), "layer 1"),
    "missing layer": (weights(lambda a: a.pop("w2") is None), "16 outputs for 9 actions"),
    "no layers": (weights(lambda a: a.clear()), "no outputs"),
    "shape": (weights(lambda a: a.update(w0=a["w0"][:, 1:])), "layer 0 of shapes"),
    "scaling of another size": (weights(lambda a: a.update(mean=a["mean"][1:])), "observation scaling"),
    "half a scaling": (weights(lambda a: a.pop("eps") is None), "observation scaling"),
    "integers": (weights(lambda a: a.update(w0=a["w0"].astype(np.int64))), "floating-point"),
    "pickled object": (weights(lambda a: a.update(w0=np.array([print], dtype=object))), "unreadable weights.npz"),
}


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def check_one_sentence(path: Path, expected: str) -> None:
    with pytest.raises(ArtefactError) as caught:
        make_policy(str(path))
    message = str(caught.value)
    assert expected in message and str(path) in message and "\n" not in message


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_B14_corruption(saved: Path, name: str) -> None:
    change, expected = CORRUPTIONS[name]
    check_one_sentence(rewritten(saved, change), expected)


def test_B14_foreign_and_truncated_files(saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    check_one_sentence(tmp_path / "absent.zip", "does not exist")
    (tmp_path / "folder.zip").mkdir()
    check_one_sentence(tmp_path / "folder.zip", "is empty")
    for cut in (0, 10, len(whole) // 3, len(whole) - 5):
        saved.write_bytes(whole[:cut])
        check_one_sentence(saved, "not a readable zip")
    saved.write_bytes(b"Once upon a time" * 100)
    check_one_sentence(saved, "not a readable zip")
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 0xFF
    saved.write_bytes(bytes(broken))
    with pytest.raises(ArtefactError):
        load_artefact(saved)
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("policy.pth", b"")
    check_one_sentence(saved, "export_sb3")


@pytest.mark.parametrize("seed", range(40))
def test_B14_random_damage_never_escapes(saved: Path, seed: int) -> None:
    """Flipped bytes end in an `ArtefactError` or, where a checksum can't see them, in a working policy."""
    rng = np.random.default_rng(seed)
    content = bytearray(saved.read_bytes())
    for place in rng.integers(0, len(content), 3):
        content[place] ^= int(rng.integers(1, 256))
    saved.write_bytes(bytes(content))
    try:
        picks(load_artefact(saved), observations(3))
    except ArtefactError:
        pass


BAD_STATES: dict[str, Any] = {
    "list": [],
    "no state": {"spec": "bandit:ucb"},
    "unknown policy": {"spec": "nonesuch", "state": {}},
    "bad spec": {"spec": "bandit:ucb,,", "state": {}},
    "zip in zip": {"spec": "other.zip", "state": {}},
    "other keys": {"spec": "bandit:ucb", "state": {"a": 1}},
    "bad sums": {"spec": "bandit:ucb", "state": {"arms": {"sums": {"ngram:2": [1]}, "recent": []}, "rng": 1}},
    "text": {"spec": "bandit:ucb", "state": {"arms": "x", "rng": "y"}},
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_B14_damaged_state(tmp_path: Path, name: str) -> None:
    path = save_policy(tmp_path / "p.zip", make_policy("bandit:ucb"), table=TABLE)
    check_one_sentence(rewritten(path, lambda m: m.update({"state.json": json.dumps(BAD_STATES[name]).encode()})), "")
