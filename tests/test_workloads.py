"""The packaged workload, foreign files, bad lines, the choice of prompts and the requests made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from assc.errors import RequestError, WorkloadError
from assc.workloads import (
    Prompt,
    assigned_split,
    content_hash,
    draft_prompts,
    load_workload,
    make_requests,
    only_categories,
    parse_workload,
    request_seed,
    select,
)

CATEGORIES = ("chat", "code", "editing", "extraction", "maths", "sql", "summarisation", "translation")


@pytest.fixture(scope="module")
def mixed() -> tuple[Prompt, ...]:
    return load_workload("mixed")


def test_mixed_is_balanced_and_split_in_three(mixed: tuple[Prompt, ...]) -> None:
    assert len(mixed) >= 240
    counts = Counter((p.category, p.split) for p in mixed)
    assert counts == {(c, s): n for c in CATEGORIES for s, n in (("draft", 24), ("train", 6), ("held-out", 6))}


def test_mixed_has_unique_ids_and_texts_in_order(mixed: tuple[Prompt, ...]) -> None:
    assert len({p.id for p in mixed}) == len({p.prompt for p in mixed}) == len(mixed)
    assert [(p.category, p.id) for p in mixed] == sorted((p.category, p.id) for p in mixed)
    assert all(p.prompt == p.prompt.strip() and p.id.startswith(p.category + "-") for p in mixed)


def test_mixed_prompts_share_no_long_run_of_words_across_the_split(mixed: tuple[Prompt, ...]) -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.lower().split()
        return {tuple(words[i : i + 10]) for i in range(len(words) - 9)}

    for one, other in (("draft", "train"), ("draft", "held-out"), ("train", "held-out")):
        seen = set().union(*(runs(p.prompt) for p in mixed if p.split == one))
        assert not any(runs(p.prompt) & seen for p in mixed if p.split == other)


def test_drafts_learn_from_their_own_split(mixed: tuple[Prompt, ...], tmp_path: Path) -> None:
    assert draft_prompts("mixed") == tuple(p for p in mixed if p.split == "draft")
    own = write(tmp_path / "own.jsonl", {"prompt": "x", "split": "train"}, {"prompt": "y", "split": "held-out"})
    assert [p.prompt for p in draft_prompts(own)] == ["x"]


def test_split_filters(mixed: tuple[Prompt, ...]) -> None:
    assert load_workload("mixed", split="held-out") == tuple(p for p in mixed if p.split == "held-out")


def write(path: Path, *lines: object) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def test_spec_bench_lines(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]},
        {"question_id": 82, "category": "math", "turns": ["Only."], "reference": ["x"]},
    ]
    prompts = load_workload(write(tmp_path / "q.jsonl", *rows))
    assert [(p.id, p.category, p.prompt) for p in prompts] == [("81", "writing", "First."), ("82", "math", "Only.")]


def test_missing_fields_are_filled_the_same_way_in_every_process_and_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}"} for i in range(60)]
    prompts = load_workload(write(tmp_path / "a.jsonl", *rows))
    backwards = load_workload(write(tmp_path / "b.jsonl", *rows[::-1]))
    assert prompts == backwards[::-1]
    assert {p.split for p in prompts} == {"train", "held-out"} and prompts[0].category == ""
    code = "from assc.workloads import assigned_split, request_seed; print(assigned_split('x'), request_seed(1, 'x'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert other == [assigned_split("x"), str(request_seed(1, "x"))]


def test_a_third_is_held_out_when_no_split_is_given() -> None:
    held = sum(assigned_split(str(i)) == "held-out" for i in range(3000))
    assert 900 < held < 1100  # about 3.9 standard deviations of a fair third; the ids are fixed


def test_text_details_survive(tmp_path: Path) -> None:
    line = '{"prompt": "a\u2028b\\r\\nc  ", "id": "x"}'  # U+2028 is a line end for str.splitlines, not for JSON
    path = tmp_path / "w.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n\r\n" + b'{"prompt": "last"}')
    prompts = load_workload(path)
    assert prompts[0].prompt == "a\u2028b\r\nc  " and prompts[1].prompt == "last"


GOOD = b'{"prompt": "fine", "id": "one"}\n'


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (b"{not json}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'["a list"]', "not a JSON object but list"),
        (b'{"text": "x"}', "neither 'prompt' nor 'turns'"),
        (b'{"prompt": "  \\n "}', "empty prompt"),
        (b'{"prompt": 5}', "not a string"),
        (b'{"prompt": null}', "not a string"),
        (b'{"turns": []}', "at least one string"),
        (b'{"turns": [1]}', "at least one string"),
        (b'{"turns": "text"}', "at least one string"),
        (b'{"turns": [""]}', "empty prompt"),
        (b'{"prompt": "again", "id": "one"}', "repeats the id 'one' of line 1"),
        (b'{"prompt": "x", "id": {}}', "neither text nor a whole number"),
        (b'{"prompt": "x", "id": true}', "neither text nor a whole number"),
        (b'{"prompt": "x", "id": ""}', "neither text nor a whole number"),
        (b'{"prompt": "x", "category": 3}', "category that is not a string"),
        (b'{"prompt": "x", "split": "test"}', "splits are draft, train, held-out"),
        (b'{"prompt": "caf\xe9"}', "is not UTF-8"),
        (b'{"prompt": "\\ud83d"}', "surrogate"),
    ],
)
def test_bad_lines_are_named_by_number(second: bytes, said: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_workload(GOOD + second + b"\n", "mine.jsonl")
    message = str(caught.value)
    assert message.startswith("workload 'mine.jsonl', line 2 ") and said in message and "\n" not in message


def test_blank_lines_count_but_do_not_matter() -> None:
    with pytest.raises(WorkloadError, match="line 4 "):
        parse_workload(GOOD + b"\n   \noops\n", "w")


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_empty_file(data: bytes) -> None:
    with pytest.raises(WorkloadError, match="is empty"):
        parse_workload(data, "w")


def test_unknown_names_and_unreadable_paths_say_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"no workload 'mixd': give mixed or the path"):
        load_workload("mixd")
    with pytest.raises(WorkloadError, match="cannot be read"):
        load_workload(tmp_path)
    with pytest.raises(WorkloadError, match="cannot be read"):
        load_workload("nul\0byte")
    only_train = write(tmp_path / "t.jsonl", {"prompt": "x", "split": "train"})
    with pytest.raises(WorkloadError, match="no prompt in the split 'held-out'"):
        load_workload(only_train, split="held-out")


def test_content_hash_sees_every_field_and_the_order(mixed: tuple[Prompt, ...]) -> None:
    p = Prompt("i", "c", "text", "train")
    changed = [Prompt("j", "c", "text", "train"), Prompt("i", "d", "text", "train"), Prompt("i", "c", "texts", "train")]
    changed.append(Prompt("i", "c", "text", "held-out"))
    assert len({content_hash([q]) for q in [p, *changed]}) == 5
    assert content_hash(mixed) != content_hash(mixed[::-1])
    assert content_hash(mixed) == content_hash(load_workload("mixed"))


def test_select_is_balanced_nested_and_seeded(mixed: tuple[Prompt, ...]) -> None:
    for n in (1, 8, 20, 24, 96):
        chosen = select(mixed, n, seed=3)
        counts = Counter(p.category for p in chosen)
        assert len(set(chosen)) == n and max(counts.values()) - min(counts.values() if n >= 8 else [1]) <= 1
        assert chosen == select(mixed[::-1], n, seed=3) == select(mixed, 100, seed=3)[:n]
    assert select(mixed, 24, seed=3) != select(mixed, 24, seed=4)
    assert {p.category for p in select(mixed, 8, seed=0)} == set(CATEGORIES)


def test_select_with_categories_of_unequal_size() -> None:
    prompts = [Prompt(f"a{i}", "a", f"a{i}", "train") for i in range(5)] + [Prompt("b0", "b", "b0", "train")]
    assert Counter(p.category for p in select(prompts, 4, 0)) == {"a": 3, "b": 1}
    assert set(select(prompts, 6, 0)) == set(prompts)


@pytest.mark.parametrize(("n", "said"), [(0, "must be 1 or more"), (-2, "must be 1 or more"), (289, "only 288")])
def test_select_refuses(mixed: tuple[Prompt, ...], n: int, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        select(mixed, n, 0)


def test_only_categories(mixed: tuple[Prompt, ...]) -> None:
    assert {p.category for p in only_categories(mixed, ["sql", "code"])} == {"sql", "code"}
    assert only_categories(mixed, []) == mixed
    with pytest.raises(WorkloadError, match="unknown category 'poems'; this workload has 'chat', 'code'"):
        only_categories(mixed, ["poems"])


def test_requests_depend_on_nothing_but_seed_and_id() -> None:
    prompts = [Prompt("a", "x", "hello", "train"), Prompt("b", "y", "hello", "train")]

    def encode(text: str) -> list[int]:
        return [ord(c) for c in text]

    first, second = make_requests(prompts, encode, max_new_tokens=9, seed=1, sampling={"temperature": 0.5})
    assert first.prompt_ids == (104, 101, 108, 108, 111) and first.max_new_tokens == 9 and first.temperature == 0.5
    assert (first.id, first.category) == ("a", "x") and first.seed != second.seed
    alone = make_requests(prompts[1:], encode, max_new_tokens=3, seed=1)
    assert alone[0].seed == second.seed == request_seed(1, "b") and alone[0].seed != request_seed(2, "b")
    assert 0 <= second.seed < 2**32


def test_requests_refuse_bad_budgets_and_empty_encodings() -> None:
    prompts = [Prompt("a", "", "hello", "train")]
    for budget in (0, -5):
        with pytest.raises(RequestError, match="1 or more"):
            make_requests(prompts, lambda text: [1], max_new_tokens=budget, seed=0)
    with pytest.raises(RequestError, match="'a' encodes to no tokens"):
        make_requests(prompts, lambda text: [], max_new_tokens=4, seed=0)
