"""Where the text of a token id is known without a model: the packaged trace's own list, or a tokenizer at hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from assc.catalogue import PAIRS
from assc.errors import AsscError
from assc.rounds_json import TextOf
from assc.shipped import shipped_trace
from assc.sources import availability
from assc.trace import Header, Trace

TEXTS = "data/traces/mixed-tokens.json"
"""texts of the token ids in the packaged trace's train and held-out requests"""


@cache
def shipped_texts() -> Mapping[int, str]:
    """Token id -> text for the packaged trace, empty where this installation has none."""
    path = files("assc").joinpath(TEXTS)
    if not path.is_file():
        return {}
    return {int(token): str(text) for token, text in json.loads(path.read_text(encoding="utf-8")).items()}


def text_of_trace(header: Header) -> TextOf | None:
    """Text of a token id of this trace, None where it cannot be known.

    The packaged list serves every trace of the packaged one's target; else the tokenizer of the trace's pair, if that
    is on this machine (importing it takes seconds; nothing is downloaded).
    """
    target = header.models.get("target")
    if header.pair in PAIRS and target is not None and shipped_texts():
        ours = shipped_trace().header
        if (header.pair, target) == (ours.pair, ours.models.get("target")):
            texts = shipped_texts()
            return lambda token: texts.get(token, f"<{token}>")
    spec = PAIRS.get(header.pair)
    if spec is None or not availability(spec.target).found:
        return None
    from assc.pairs import load_tokenizer

    try:
        tokenizer = load_tokenizer(header.pair)
    except AsscError:
        return None
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def list_texts(trace: Trace, text_of: TextOf, splits: Sequence[str] = ("train", "held-out")) -> dict[str, str]:
    """What `TEXTS` holds for a trace: the text of every token id in its requests of these splits."""
    offsets, tokens, ids = trace.columns["offsets"], trace.columns["tokens"], set[int]()
    for split in splits:
        for row in trace.where(split=split):
            ids.update(tokens[int(offsets[row]) : int(offsets[row + 1])].tolist())
    return {str(token): text_of(token) for token in sorted(ids)}
