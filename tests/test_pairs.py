"""Loading pairs by name and by path, what they promise, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from assc.errors import PairError, RequestError, UnsupportedModelError
from assc.pairs import PAIRS, LoadedPair, load_pair, make_pair
from assc.support import check_supported, check_tokenizers
from assc.tiny import CHARACTERS, VOCAB_SIZE, tiny_draft, tiny_pair, tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def tiny() -> LoadedPair:
    return tiny_pair()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` and `draft` as directories on disk."""
    root = tmp_path_factory.mktemp("pair")
    target = tiny_target(dtype=torch.float32)
    for name, model in {"target": target, "draft": tiny_draft(target)}.items():
        model.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    return root


def small(config: Any) -> dict[str, Any]:
    return {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, **config}


def mamba() -> Any:
    return MambaForCausalLM(MambaConfig(**small({"state_size": 4})))


class Running(nn.Module):
    """A model that folds its past into one vector: nothing in it can be rolled back."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(vocab_size=40)
        self.cell = nn.GRU(4, 4)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return input_ids


def test_catalogue_is_complete() -> None:
    assert {"smollm2", "tiny", "smollm2-1.7b-135m", "qwen2.5-72b-3b", "llama2-70b-7b"} <= set(PAIRS)
    for spec in PAIRS.values():
        assert spec.licence and spec.origin and spec.target
        assert "ngram" not in spec.drafts


def test_unknown_pair_names_the_known_ones() -> None:
    with pytest.raises(PairError, match=r"unknown pair 'smolm'; known pairs: smollm2, tiny"):
        load_pair("smolm")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"device": "abacus"}, "device 'abacus' is not available"),
        ({"threads": 0}, "threads is 1 or more"),
        ({"draft": "./nowhere"}, r"no model at \./nowhere"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(PairError, match=words) as error:
        load_pair("tiny", **arguments)
    assert "\n" not in str(error.value)


def test_tiny_is_ready_and_deterministic(tiny: LoadedPair) -> None:
    again = load_pair("tiny")
    assert (tiny.name, tiny.dtype, tiny.device.type, tiny.vocab_size) == ("tiny", torch.float64, "cpu", VOCAB_SIZE)
    assert tiny.eos_token_ids == (0,)
    for mine, other in ((tiny.target, again.target), (tiny.drafts["model"], again.drafts["model"])):
        assert not mine.training
        assert mine.dtype == torch.float64
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
            assert not a.requires_grad


def test_loading_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    pair = tiny_pair()
    tiny_draft(pair.target, vocab_size=120)  # type: ignore[arg-type]
    assert torch.equal(before, torch.get_rng_state())


def test_tiny_is_neither_trivial_nor_hopeless(tiny: LoadedPair) -> None:
    """Draft and target agree often but not always, entropy is moderate, and greedy texts run for tens of tokens."""
    agreement, entropy, lengths = [], [], []
    target: Any = tiny.target
    for prompt in ("What is the capital of France?", "def f(x):", "Sum: 1+2", "Hello", "The quick brown fox", "zzz"):
        ids = torch.tensor([tiny.encode(prompt)])
        text = target.generate(ids, max_new_tokens=64, do_sample=False)
        start = ids.shape[1]
        lengths.append(text.shape[1] - start)
        p = target(text).logits[0, start - 1 : -1]
        q = tiny.drafts["model"](text).logits[0, start - 1 : -1]
        agreement.append((p.argmax(-1) == q.argmax(-1)).double().mean().item())
        entropy.append(torch.distributions.Categorical(logits=p).entropy().mean().item())
    assert 0.4 < sum(agreement) / len(agreement) < 0.85
    assert 1.5 < sum(entropy) / len(entropy) < 4.0
    assert sum(lengths) / len(lengths) > 30


@pytest.mark.parametrize("text", ["Hello, world!", "a\nb\n\n c  d", CHARACTERS, " leading and trailing "])
def test_tiny_tokenizer_round_trip(tiny: LoadedPair, text: str) -> None:
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    assert len(ids) == len(text)


@pytest.mark.parametrize("prompt", ["", " ", "\n\t  \n"])
def test_empty_prompts_are_refused(tiny: LoadedPair, prompt: str) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        tiny.encode(prompt)


def test_chat_template_is_used_and_can_be_turned_off(saved: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    pair = make_pair("chat", tiny_target(), tokenizer)
    assert pair.decode(pair.encode("hi")) == "[user]hi>"
    assert pair.decode(pair.encode("hi", chat=False)) == "hi"
    assert all(type(i) is int for i in pair.encode("hi"))


def test_custom_pair_from_directories(saved: Path) -> None:
    pair = load_pair(target=str(saved / "target"), draft=str(saved / "draft"), device="cpu", dtype="float32")
    assert pair.name == "target+draft"
    assert set(pair.drafts) == {"model"}
    assert pair.vocab_size == VOCAB_SIZE
    assert torch.equal(pair.target.lm_head.weight, tiny_target(dtype=torch.float32).lm_head.weight)
    alone = load_pair(target=str(saved / "target"), device="cpu", dtype="float64")
    assert alone.drafts == {}
    assert alone.target.dtype == torch.float64


def test_a_draft_can_be_added_to_a_named_pair(saved: Path) -> None:
    pair = load_pair("tiny", draft=str(saved / "draft"), device="cpu")
    assert pair.name == "tiny+draft"
    assert pair.drafts["model"].dtype == pair.target.dtype == torch.float64


def test_directory_without_tokenizer(saved: Path, tmp_path: Path) -> None:
    tiny_draft().float().save_pretrained(tmp_path / "bare")
    with pytest.raises(PairError, match=r"the tokenizer of .*bare cannot be read"):
        load_pair(target=str(tmp_path / "bare"))
    with pytest.raises(PairError, match=r"the tokenizer of .*bare cannot be read"):
        load_pair(target=str(saved / "target"), draft=str(tmp_path / "bare"))
    pair = load_pair(target=str(saved / "target"), draft=str(tmp_path / "bare"), force_tokenizer=True)
    assert pair.vocab_size == VOCAB_SIZE


def test_damaged_weights_are_one_sentence(saved: Path, tmp_path: Path) -> None:
    for file in (saved / "target").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 50)
    with pytest.raises(PairError, match="cannot be loaded") as error:
        load_pair(target=str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(98, 64), (64, 98), (98, 120), (120, 98)])
def test_T06_padded_vocabularies_share_their_overlap(target_rows: int, draft_rows: int) -> None:
    target = tiny_target(vocab_size=target_rows)
    draft = tiny_draft(target, vocab_size=draft_rows)
    pair = make_pair("padded", target, tiny_tokenizer(), {"model": draft})
    assert pair.vocab_size == min(target_rows, draft_rows, VOCAB_SIZE)


def with_vocabulary(texts: list[str]) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    vocab = {text: i for i, text in enumerate(texts)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token=texts[0])))


def test_T06_tokenizers_of_other_length_pass_and_other_texts_are_refused() -> None:
    base = with_vocabulary(["<unk>", "a", "b", "c"])
    assert check_tokenizers(base, with_vocabulary(["<unk>", "a", "b"])) == 3
    assert check_tokenizers(base, with_vocabulary(["<unk>", "a", "b", "c", "<pad1>", "<pad2>"])) == 4
    other = with_vocabulary(["<unk>", "a", "x", "y"])
    with pytest.raises(PairError, match=r"differ at id 2 \('b' and 'x'\)") as error:
        check_tokenizers(base, other)
    assert "\n" not in str(error.value)
    assert check_tokenizers(base, other, force=True) == 4


def test_T06_load_pair_refuses_foreign_tokenizers_unless_forced(saved: Path, tmp_path: Path) -> None:
    tiny_draft(vocab_size=4).float().save_pretrained(tmp_path)
    with_vocabulary(["<eos>", "<unk>", "x", "y"]).save_pretrained(tmp_path)
    with pytest.raises(PairError, match=r"differ at id 2 \('\\n' and 'x'\)"):
        load_pair(target=str(saved / "target"), draft=str(tmp_path))
    pair = load_pair(target=str(saved / "target"), draft=str(tmp_path), force_tokenizer=True)
    assert pair.vocab_size == 4


def test_T12_recurrent_models_are_refused_by_name() -> None:
    lfm = Lfm2ForCausalLM(
        Lfm2Config(
            **small({"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}),
            layer_types=["conv", "full_attention"],
        )
    )
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    bloom = BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=2))
    for model in (mamba(), lfm, t5, bloom, Running()):
        with pytest.raises(UnsupportedModelError, match=type(model).__name__) as error:
            check_supported(model)
        assert "\n" not in str(error.value)
    check_supported(tiny_target())


def test_T12_recurrent_targets_are_refused_with_the_ngram_drafter_too(tmp_path: Path) -> None:
    mamba().save_pretrained(tmp_path)
    with_vocabulary([str(i) for i in range(40)]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        load_pair(target=str(tmp_path), dtype="float32")
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        make_pair("draft", tiny_target(), tiny_tokenizer(), {"model": mamba()})


def test_T12_encoder_decoder_directory_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    T5Config(vocab_size=40, architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with_vocabulary([str(i) for i in range(40)]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration"):
        load_pair(target=str(tmp_path))


def test_S04_each_model_keeps_its_dtype() -> None:
    target = tiny_target(dtype=torch.float32)
    draft = tiny_draft(tiny_target(dtype=torch.bfloat16))
    pair = make_pair("mixed", target, tiny_tokenizer(), {"model": draft})
    assert (pair.dtype, pair.target.dtype, pair.drafts["model"].dtype) == (
        torch.float32,
        torch.float32,
        torch.bfloat16,
    )


def test_smollm2_answers(smollm2: LoadedPair) -> None:
    assert (smollm2.name, smollm2.vocab_size, smollm2.eos_token_ids) == ("smollm2", 49152, (2,))
    assert smollm2.dtype == torch.bfloat16
    ids = smollm2.encode("What is the capital of France?")
    assert smollm2.decode(ids, skip_special_tokens=False).endswith("<|im_end|>\n<|im_start|>assistant\n")
    target: Any = smollm2.target
    output = target.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    assert output[-1] == 2
    assert smollm2.decode(output) == "The capital of France is Paris."
    text = "def f(a):\n\treturn  a + 1  # naïve é 日本 12345"
    assert smollm2.decode(smollm2.encode(text, chat=False)) == text
