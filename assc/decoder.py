"""The public decoder: generate or stream one prompt under a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from assc.core import Episode, FinishReason, Mode, Policy, Request, RoundRecord, Totals
from assc.engine import Engine
from assc.errors import RequestError
from assc.live import LiveBackend
from assc.registry import make_policy
from assc.run import iter_rounds
from assc.stopping import IncrementalText, StoppingCriterion

if TYPE_CHECKING:
    from assc.pairs import LoadedPair


@dataclass(frozen=True)
class StreamChunk:
    """What one round committed. `text` holds complete characters only; joined chunks give the whole text."""

    tokens: tuple[int, ...]
    text: str
    record: RoundRecord


@dataclass(frozen=True)
class GenerateResult:
    """A finished generation: new token ids, their text, why it ended, and every round."""

    tokens: tuple[int, ...]
    text: str
    finish: FinishReason
    matched_stop: str | None
    logprobs: tuple[float, ...] | None
    """natural log of the target's probability of each token, at temperature 1 and before any processor"""
    episode: Episode
    prefill_seconds: float

    @property
    def totals(self) -> Totals:
        return Totals.of(self.episode.rounds)


class SpeculativeDecoder:
    """Lossless speculative decoding, its draft length steered by a policy.

    The output is the target's own: token for token what plain decoding gives in modes greedy and gumbel, and
    distributed as the target's in mode rejection. `policy="ar"` is plain decoding through the same engine. A policy
    that learns online goes on learning from call to call; everything else starts afresh with each request.
    """

    def __init__(
        self, engine: Engine, *, policy: str | Policy = "assc", tokenizer: Any = None, pair: LoadedPair | None = None
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer if tokenizer is not None else engine.tokenizer
        self.pair = pair
        self.policy = make_policy(policy) if isinstance(policy, str) else policy

    @classmethod
    def from_pair(
        cls,
        pair: str | LoadedPair = "smollm2",
        *,
        policy: str | Policy = "assc",
        k_max: int = 16,
        chunks: int = 1,
        unload_after: int | None = None,
        **options: Any,
    ) -> SpeculativeDecoder:
        """Load a named pair (`options` go to `assc.pairs.load_pair`) or take a loaded one.

        `chunks` verifies drafted tokens in so many groups, until one holds a rejection (docs/chunked-verification.md);
        `unload_after` unloads a draft that was not asked for so many rounds (docs/several-drafts.md).
        """
        from assc.loading import build_engine
        from assc.pairs import load_pair

        policy = make_policy(policy) if isinstance(policy, str) else policy  # a wrong spec should not cost a load
        loaded = load_pair(pair, **options) if isinstance(pair, str) else pair
        engine = build_engine(loaded, k_max=k_max, chunks=chunks, unload_after=unload_after)
        return cls(engine, policy=policy, tokenizer=loaded.tokenizer, pair=loaded)

    def encode(self, prompt: str | Sequence[int], *, chat: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt, through the chat template if the tokenizer has one; ids pass unchanged."""
        if not isinstance(prompt, str):
            return tuple(int(t) for t in prompt)
        if self.pair is not None:
            return self.pair.encode(prompt, chat=chat)
        if self.tokenizer is None:
            raise RequestError("this decoder has no tokenizer; give the prompt as token ids")
        return tuple(self.tokenizer.encode(prompt))

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        mode: Mode | None = None,
        seed: int = 0,
        policy: str | Policy | None = None,
        stop: str | Sequence[str] = (),
        eos_ids: Sequence[int] | None = None,
        stopping_criteria: Sequence[StoppingCriterion] = (),
        logprobs: bool = False,
        chat: bool = True,
        **sampling: Any,
    ) -> Generation:
        """Start a generation and return an iterator of `StreamChunk`, one per round.

        `mode` defaults to greedy at temperature 0 (the default temperature) and to gumbel above. `sampling` takes the
        fields of `assc.sampling.SamplingParams`. Stopping the iteration early leaves nothing behind.
        """
        if mode is None:
            mode = "gumbel" if sampling.get("temperature", 0.0) else "greedy"
        request = Request(
            prompt_ids=self.encode(prompt, chat=chat), max_new_tokens=max_new_tokens, seed=seed, sampling=sampling
        )
        backend = LiveBackend(self.engine, mode=mode)
        backend.extras = {
            "stop": (stop,) if isinstance(stop, str) else tuple(stop),
            "criteria": tuple(stopping_criteria),
            "eos_ids": None if eos_ids is None else tuple(eos_ids),
            "logprobs": logprobs,
        }
        chosen = self.policy if policy is None else make_policy(policy) if isinstance(policy, str) else policy
        return Generation(backend, request, chosen, self.tokenizer)

    def generate(self, prompt: str | Sequence[int], *, streamer: Any = None, **options: Any) -> GenerateResult:
        """Decode to the end. Takes the options of `stream`, and a transformers streamer such as `TextStreamer`."""
        generation = self.stream(prompt, **options)
        if streamer is not None:
            streamer.put(torch.tensor([generation.request.prompt_ids]))
        try:
            for chunk in generation:
                if streamer is not None:
                    for token in chunk.tokens:
                        streamer.put(torch.tensor([token]))
        finally:
            if streamer is not None:
                streamer.end()
        return generation.result()


class Generation:
    """An iterator over the rounds of one request; `result()` after the end."""

    def __init__(self, backend: LiveBackend, request: Request, policy: Policy, tokenizer: Any) -> None:
        self.request = request
        self._backend = backend
        self._policy = policy
        self._rounds: list[RoundRecord] = []
        self._text = IncrementalText(tokenizer) if tokenizer is not None else None
        self._iterator = iter_rounds(backend, request, policy)

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        record = next(self._iterator)
        self._rounds.append(record)
        return StreamChunk(record.tokens, self._push(record), record)

    def _push(self, record: RoundRecord) -> str:
        if self._text is None:
            return ""
        before = self._text.text
        new = self._text.push(record.tokens)
        if record.finish is None:
            return new
        self._text.flush()
        whole = self._text.text
        stopped = self._backend.batch.rows[0].stopper.text if record.finish == "stop" else None
        if stopped is not None:
            self._text.text = whole = stopped
        return whole[len(before) :]

    def result(self) -> GenerateResult:
        """The whole generation. Raises `RuntimeError` while rounds are missing."""
        if not self._rounds or self._rounds[-1].finish is None:
            raise RuntimeError("the generation has not ended; iterate it to the end first")
        row = self._backend.batch.rows[0]
        finish = self._rounds[-1].finish
        return GenerateResult(
            tokens=tuple(row.tokens[row.prompt_length :]),
            text=self._text.text if self._text is not None else "",
            finish=finish,
            matched_stop=row.stopper.matched if finish == "stop" else None,
            logprobs=None if row.logprobs is None else tuple(row.logprobs),
            episode=Episode(self.request, self._policy.spec, tuple(self._rounds)),
            prefill_seconds=self._backend.prefill_seconds,
        )
