"""GGUF to a plain Hugging Face directory, once, in the user's cache.

Dequantising takes seconds each time, so the weights are copied into a fresh model (built without the quantisation
part of the config) and stored as bfloat16 safetensors, from which every later run loads. A finished directory appears
by one rename: readers never see half of it, and of two processes that convert at the same time the second throws its
copy away.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs

from assc.errors import PairError

FORMAT = 1
"""version of the cached layout; another one is converted anew"""
MANIFEST = "assc.json"
STALE_SECONDS = 24 * 3600
"""age after which the working directory of a killed process is swept away"""


def say(text: str) -> None:
    """One status line on stderr, so that stdout stays the program's result."""
    print(f"assc: {text}", file=sys.stderr, flush=True)


def cache_dir() -> Path:
    """Where models are kept: `$ASSC_CACHE`, or the user's cache directory of this system. Not created here."""
    override = os.environ.get("ASSC_CACHE")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("assc"))


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def workspace(name: str) -> Iterator[Path]:
    """A private directory inside the cache, removed at the end whatever happens.

    It lies in the cache so that the final rename stays on one file system. Raises `PairError` when the cache cannot
    be written.
    """
    root = cache_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        for old in root.glob(".*.tmp"):
            with suppress(FileNotFoundError):  # another process sweeps too
                if time.time() - old.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(old, ignore_errors=True)
        path = Path(tempfile.mkdtemp(prefix=f".{name}-", suffix=".tmp", dir=root))
    except OSError as error:
        raise PairError(
            f"the cache directory {root} cannot be written ({error.strerror}); set ASSC_CACHE to another one"
        ) from error
    try:
        yield path
    except OSError as error:
        advice = (
            "; free some space or set ASSC_CACHE"
            if error.errno in {errno.ENOSPC, getattr(errno, "EDQUOT", None)}
            else ""
        )
        raise PairError(f"preparing the model in {root} failed: {error}{advice}") from error
    finally:
        shutil.rmtree(path, ignore_errors=True)


def cached(name: str) -> Path | None:
    """The finished directory `name` of the cache, None if there is none; `PairError` if it is damaged."""
    path = cache_dir() / name
    if not path.exists():
        return None
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"it has format {manifest['format']}, this version writes {FORMAT}")
        for file, (size, digest) in manifest["files"].items():
            if (path / file).stat().st_size != size or sha256(path / file) != digest:
                raise ValueError(f"{file} has changed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PairError(
            f"the cached model {path} is damaged ({error}); delete that directory and run again to rebuild it"
        ) from error
    return path


def convert_gguf(gguf: Path, name: str) -> Path:
    """Dequantise `gguf` into the directory `name` of the cache and return its path; `PairError` if that fails."""
    final = cache_dir() / name
    say(f"converting {gguf.name} to {final} (once, takes a while)")
    with workspace(name) as work:
        made = work / "model"
        made.mkdir()
        try:
            _write_model(gguf, made)
        except (OSError, MemoryError, PairError):
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise PairError(f"the GGUF file {gguf} cannot be converted: {reason}") from error
        files = {f.name: (f.stat().st_size, sha256(f)) for f in sorted(made.iterdir())}
        manifest = {"format": FORMAT, "source": gguf.name, "files": files}
        (made / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        try:
            os.replace(made, final)
        except OSError:
            if not final.is_dir():  # not a finished directory of another process: a real failure
                raise
    return cached(name) or final


def _write_model(gguf: Path, directory: Path) -> None:
    """Save model (bfloat16), tokenizer and generation config of a GGUF file as a Hugging Face directory."""
    import torch
    import transformers

    from assc.gguf_weights import open_gguf, read_weights

    hf: Any = transformers  # its functions are partly untyped
    reader = open_gguf(gguf)
    with quiet_transformers():
        config: Any = hf.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config.dtype = torch.bfloat16
        model: Any = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        parameters = model.state_dict()
        loaded = set()
        for name, weight in read_weights(reader, config.num_attention_heads, config.num_key_value_heads):
            if name not in parameters or parameters[name].shape != weight.shape:
                raise PairError(f"{gguf} holds {name}, which does not fit a {type(model).__name__} of its own header")
            parameters[name].copy_(weight)
            loaded.add(name)
        if config.tie_word_embeddings:
            loaded.add("lm_head.weight")
        if missing := set(parameters) - loaded:
            raise PairError(f"{gguf} lacks {len(missing)} weights, the first is {min(missing)}")
        tokenizer: Any = hf.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        eos = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
        model.generation_config = hf.GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=eos, pad_token_id=config.pad_token_id
        )
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings and progress bars; everything is put back afterwards."""
    import transformers

    hf_logging: Any = transformers.utils.logging
    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    previous = logging.root.manager.disable
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.disable(logging.WARNING)  # some modules log through plain `logging`
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
