"""Model pairs: a target, its model drafts and their common tokenizer, loaded by name or from paths.

>>> pair = load_pair("tiny")
>>> pair.decode(pair.encode("Hello"))
'Hello'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from assc.catalogue import MODEL_DRAFTER, NGRAM_DRAFTER, PAIRS, PairSpec, pair_spec
from assc.convert import quiet_transformers
from assc.device import check_threads, resolve_device, resolve_dtype
from assc.drafters.artefact import design_of, is_net, read_config
from assc.errors import PairError, RequestError, UnsupportedModelError
from assc.sources import TINY, locate
from assc.support import check_supported, check_tokenizers, vocabulary_rows

__all__ = ["MODEL_DRAFTER", "PAIRS", "LoadedPair", "PairSpec", "check_supported", "load_pair", "make_pair", "pair_spec"]


@dataclass(frozen=True)
class LoadedPair:
    """Models ready to decode: in evaluation mode, without gradients, on one device."""

    name: str
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafts: dict[str, PreTrainedModel]
    """model drafts by drafter name; the n-gram drafter is not listed"""
    device: torch.device
    dtype: torch.dtype
    """the target's; each draft keeps its own"""
    vocab_size: int
    """ids that tokenizer, target and every draft agree on: what a drafter may propose. The target itself is free to
    emit any of its ids, or its output would not be its own."""
    eos_token_ids: tuple[int, ...]
    licence: str = ""
    source: str = ""
    learned: Mapping[str, Path] = field(default_factory=dict)
    """folders of learned drafts (`python -m assc distill`) by drafter name"""

    def label(self) -> dict[str, Any]:
        """Name, device, dtype and torch's threads, for result files."""
        return {
            "pair": self.name,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }

    def encode(self, prompt: str, *, chat: bool = True) -> tuple[int, ...]:
        """Token ids of one user message in the chat template, or of the bare text if `chat` is off or none exists.

        Raises `RequestError` for a prompt without text.
        """
        if not prompt.strip():
            raise RequestError("the prompt is empty; give at least one character that is not white space")
        tokenizer: Any = self.tokenizer
        if chat and tokenizer.chat_template:
            message = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
        else:
            ids = tokenizer(prompt)["input_ids"]
        if not ids:
            raise RequestError("the prompt has no tokens in this tokenizer; give other text")
        return tuple(int(i) for i in ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        tokenizer: Any = self.tokenizer
        return str(
            tokenizer.decode(
                [int(i) for i in ids], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )


def load_pair(
    name: str = "smollm2",
    *,
    target: str | None = None,
    draft: str | Sequence[str] | None = None,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    force_tokenizer: bool = False,
) -> LoadedPair:
    """Load a pair of the catalogue, or a custom one.

    `target` (directory, `.gguf` file or hub id) replaces the whole named pair; `draft` adds or replaces the draft
    called `model`, or, when it is the folder of a learned draft, adds it as the drafter `hidden` or `layers`, after
    its design. There may be several drafts; NAME=SOURCE gives one another name. `dtype="auto"` is
    `assc.device.default_dtype`, and float64 for the pair `tiny`. `threads` sets torch's threads for the process.
    Raises `PairError`, `ArtefactError` for a learned draft that cannot be read, or `UnsupportedModelError` for a model
    whose state cannot be rolled back.
    """
    if threads is not None:
        check_threads(threads)
        torch.set_num_threads(threads)
    given = named_drafts([draft] if isinstance(draft, str) else draft or ())
    learned = {key: Path(source) for key, source in given.items() if is_net(Path(source))}
    spec = _resolve(name, target, given, {key: source for key, source in given.items() if key not in learned})
    where = resolve_device(device)
    kind = torch.float64 if dtype == "auto" and spec.target.startswith(TINY) else resolve_dtype(dtype, where)
    target_at = _place(spec.target)
    drafts_at = {key: _place(source) for key, source in spec.drafts.items()}
    tokenizer = _tokenizer(target_at)
    draft_tokenizers: dict[str, Any] = {}
    for key, place in drafts_at.items():  # before any weights are read: a mismatch is told at once
        try:
            draft_tokenizers[key] = _tokenizer(place)
        except PairError:
            if not force_tokenizer:
                raise
            continue  # forced: it is taken to use the target's
        check_tokenizers(tokenizer, draft_tokenizers[key], force=force_tokenizer, draft_name=f"draft {key!r}")
    loaded = make_pair(
        spec.name,
        _model(target_at, where, kind),
        tokenizer,
        {key: _model(place, where, kind) for key, place in drafts_at.items()},
        draft_tokenizers=draft_tokenizers,
        licence=spec.licence,
        source=spec.origin,
        force_tokenizer=force_tokenizer,
    )
    packaged = {key: packaged_draft(folder) for key, folder in spec.learned.items() if key not in spec.drafts}
    return replace(loaded, learned={**packaged, **learned})


def named_drafts(given: Sequence[str]) -> dict[str, str]:
    """Drafter name -> source of drafts given as SOURCE or NAME=SOURCE. Raises `PairError` for names that collide.

    >>> named_drafts(["small=org/small", "org/other"])
    {'small': 'org/small', 'model': 'org/other'}
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, source = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z][\w.-]*", name) or Path(text).exists():
            name, source = "", text
        if not source.strip():
            raise PairError(f"the draft {text!r} names no source; give a folder or a hub id, or NAME=SOURCE")
        if not name:
            name = design_of(read_config(Path(source))) if is_net(Path(source)) else MODEL_DRAFTER
        if name in found or name == NGRAM_DRAFTER:
            why = "it is the name of the lookup" if name == NGRAM_DRAFTER else f"{found[name]} has that name already"
            raise PairError(f"the draft {source} cannot be called {name!r}: {why}; give it another as NAME={source}")
        found[name] = source
    return found


def draft_data(given: Sequence[str]) -> dict[str, str]:
    """The same for a manifest: "draft NAME" -> source."""
    return {f"draft {name}": source for name, source in named_drafts(given).items()}


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a named pair's target, without its models. Raises `PairError`."""
    return _tokenizer(_place(pair_spec(name).target))


def packaged_draft(name: str) -> Path:
    """The folder of a learned draft that comes with the package."""
    return Path(__file__).parent / "data" / "drafts" / name


def make_pair(
    name: str,
    target: Any,
    tokenizer: Any,
    drafts: Mapping[str, Any] | None = None,
    *,
    draft_tokenizers: Mapping[str, Any] | None = None,
    licence: str = "",
    source: str = "",
    force_tokenizer: bool = False,
) -> LoadedPair:
    """A pair out of models that are already loaded. They are checked, never changed.

    A draft without an entry in `draft_tokenizers` is taken to use the target's tokenizer. Raises `PairError` and
    `UnsupportedModelError`.
    """
    drafts = dict(drafts or {})
    usable = min(vocabulary_rows(target), max(tokenizer.get_vocab().values(), default=-1) + 1)
    check_supported(target)
    for key, model in drafts.items():
        check_supported(model)
        other = (draft_tokenizers or {}).get(key, tokenizer)
        overlap = check_tokenizers(tokenizer, other, force=force_tokenizer, draft_name=f"draft {key!r}")
        usable = min(usable, overlap, vocabulary_rows(model))
    if usable < 1:
        raise PairError(f"the vocabularies of the pair {name!r} have no id in common")
    return LoadedPair(
        name=name,
        target=target,
        tokenizer=tokenizer,
        drafts=drafts,
        device=torch.device(target.device),
        dtype=target.dtype,
        vocab_size=usable,
        eos_token_ids=_eos_ids(target, tokenizer),
        licence=licence,
        source=source,
    )


def _resolve(name: str, target: str | None, given: Mapping[str, str], models: Mapping[str, str]) -> PairSpec:
    """The named pair with what the caller replaced in it; `models` are those of the `given` drafts that are models."""
    suffix = "".join(f"+{Path(source).name}" for source in given.values())
    told = "".join(f"; draft: {source}" for source in given.values())
    if target is None:
        spec = pair_spec(name)
        if not given:
            return spec
        kept = {key: source for key, source in spec.drafts.items() if key not in given}
        return replace(spec, name=name + suffix, drafts={**kept, **models}, origin=spec.origin + told)
    title = Path(target).name + suffix
    return PairSpec(title, target, dict(models), licence="unknown (given by path)", origin=target + told)


def _place(source: str) -> str:
    """Local directory of a source; models built in code keep their name."""
    return source if source.startswith(TINY) else str(locate(source))


def _tokenizer(place: str) -> Any:
    """The tokenizer of a model directory. Raises `PairError` with the first line of what went wrong."""
    if place.startswith(TINY):
        from assc.tiny import tiny_tokenizer

        return tiny_tokenizer()
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(place)
    except Exception as error:  # transformers raises anything from OSError to KeyError here
        raise PairError(f"the tokenizer of {place} cannot be read: {_reason(error)}") from error


def _model(place: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A model in evaluation mode without gradients. Raises `PairError` with the first line of what went wrong."""
    if place.startswith(TINY):
        from assc.tiny import tiny_draft, tiny_target

        target = tiny_target(dtype=dtype)
        small: Any = target if place == TINY + "target" else tiny_draft(target)
        return small.to(device)
    try:
        with quiet_transformers():
            config: Any = AutoConfig.from_pretrained(place)
            if getattr(config, "is_encoder_decoder", False):
                names = ", ".join(config.architectures or [type(config).__name__])
                raise UnsupportedModelError(f"{names} is not supported because it is an encoder-decoder model")
            model: Any = _pretrained(place, config, dtype)
            return model.to(device).eval().requires_grad_(False)
    except PairError:
        raise
    except torch.OutOfMemoryError:
        raise PairError(f"{place} does not fit into the memory of {device} in {dtype}") from None
    except Exception as error:
        raise PairError(f"the model {place} cannot be loaded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """First line of a foreign error, for one sentence of ours."""
    return (str(error).strip().splitlines() or [""])[0].rstrip(".") or type(error).__name__


def _pretrained(place: str, config: Any, dtype: torch.dtype) -> Any:
    """Load with sdpa attention, or eager where a model has no other."""
    try:
        return AutoModelForCausalLM.from_pretrained(place, config=config, dtype=dtype, attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return AutoModelForCausalLM.from_pretrained(place, config=config, dtype=dtype, attn_implementation="eager")


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """What ends a text: as in transformers' `generate`, the generation config; else the config, else the tokenizer."""
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return tuple(int(i) for i in ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()
