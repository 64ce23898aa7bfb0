"""Traces on disk: the same after a round trip, and one clear sentence for everything that can be wrong with a file."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_traces import tiny_trace

from assc.__main__ import main
from assc.errors import TraceError
from assc.trace import SCHEMA, Trace
from assc.trace_build import concatenate
from assc.trace_io import HEADER, _mark, read_trace, write_trace


def same(a: Trace, b: Trace) -> bool:
    return a.header == b.header and all((a.columns[n] == b.columns[n]).all() for n in a.columns | b.columns)


@pytest.mark.parametrize("name", ["t.npz", "folder"])
def test_a_round_trip_changes_nothing_and_bytes_repeat(tmp_path: Path, name: str) -> None:
    trace = tiny_trace()
    write_trace(trace, tmp_path / name)
    assert same(read_trace(tmp_path / name), trace)
    write_trace(read_trace(tmp_path / name), tmp_path / f"again-{name}")
    if name.endswith(".npz"):
        assert (tmp_path / name).read_bytes() == (tmp_path / f"again-{name}").read_bytes()
    else:
        mapped = read_trace(tmp_path / name, mmap=True)
        assert isinstance(mapped.columns["tokens"], np.memmap) and same(mapped, trace)
    assert not list(tmp_path.glob("*.part"))


def test_select_and_concatenate_are_inverse() -> None:
    trace = tiny_trace()
    parts = [trace.select([0, 1]), trace.select(range(2, len(trace)))]
    assert same(concatenate(parts), trace)
    assert trace.select([3]).request(0) == trace.request(3)
    other = Trace(replace(trace.header, dtype="float16"), trace.columns, "other.npz")
    with pytest.raises(TraceError, match=r"other\.npz was recorded with other settings"):
        concatenate([trace, other])


def test_a_truncated_file_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    write_trace(tiny_trace(), path)
    whole = path.read_bytes()
    for share in (0, 0.01, 0.3, 0.9, 0.999):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(TraceError, match="damaged or truncated"):
            read_trace(path)


def test_flipped_bytes_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    write_trace(tiny_trace(), path)
    whole = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        places = [i.header_offset + 30 + len(i.filename) + i.compress_size // 2 for i in archive.infolist()]
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 0x55
        path.write_bytes(bytes(broken))
        with pytest.raises(TraceError):
            read_trace(path)


def test_a_changed_column_of_a_folder_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    write_trace(tiny_trace(), path)
    column = path / "acc@model.npy"
    whole = column.read_bytes()
    column.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(TraceError, match="checksum of the column 'acc/model'"):
        read_trace(path)
    column.write_bytes(whole[:-9])
    with pytest.raises(TraceError, match="damaged or truncated"):
        read_trace(path)
    column.unlink()
    with pytest.raises(TraceError, match=r"acc@model\.npy is missing"):
        read_trace(path)


@pytest.mark.parametrize(
    ("schema", "words"), [(SCHEMA + 1, "newer than the"), (0, "reads schema"), (None, "reads schema")]
)
def test_other_versions_are_refused(tmp_path: Path, schema: int | None, words: str) -> None:
    path = tmp_path / "folder"
    write_trace(tiny_trace(), path)
    head = json.loads((path / HEADER).read_text())
    head["header"]["schema"] = schema
    (path / HEADER).write_text(json.dumps(head))
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_the_version_before_is_read(tmp_path: Path) -> None:
    """Schema 1: no confidences per draft step, and no `steps` in the header."""
    path, trace = tmp_path / "folder", tiny_trace()
    columns = {n: c for n, c in trace.columns.items() if not n.startswith("step_")}
    assert len(columns) == len(trace.columns) - 4
    drafters = tuple(replace(d, steps=0) for d in trace.header.drafters)
    write_trace(Trace(replace(trace.header, drafters=drafters, schema=1), columns), path)
    head = json.loads((path / HEADER).read_text())
    for drafter in head["header"]["drafters"]:
        del drafter["steps"]
    head["header_sha256"] = _mark(head["header"])
    (path / HEADER).write_text(json.dumps(head))
    old = read_trace(path)
    assert old.header.schema == 1 and [d.steps for d in old.header.drafters] == [0, 0]
    assert all((old.columns[n] == c).all() for n, c in columns.items())
    write_trace(old, tmp_path / "old.npz")
    assert read_trace(tmp_path / "old.npz").header == old.header


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("step_prob/model"), "lacks the column 'step_prob/model'"),
        (lambda c: c.update({"step_top1/model": c["step_top1/model"][:, :3]}), "wrong kind or shape"),
        (lambda c: c.update({"step_top1/model": c["step_top1/model"].astype(np.int64)}), "wrong kind or shape"),
    ],
)
def test_codes_of_another_shape_are_refused(change: Any, words: str) -> None:
    trace = tiny_trace()
    columns = dict(trace.columns)
    change(columns)
    with pytest.raises(TraceError, match=words):
        Trace(trace.header, columns)


def test_a_changed_header_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    write_trace(tiny_trace(), path)
    text = (path / HEADER).read_text()
    (path / HEADER).write_text(text.replace('"device": "cpu"', '"device": "gpu"'))
    with pytest.raises(TraceError, match="checksum of its header"):
        read_trace(path)


def test_no_trace_at_all_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no trace at"):
        read_trace(tmp_path / "none.npz")
    with pytest.raises(TraceError, match="is no trace"):
        read_trace(tmp_path)
    (tmp_path / "x.npz").write_text("hello")
    with pytest.raises(TraceError, match="no trace at all"):
        read_trace(tmp_path / "x.npz")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine.txt").write_text("mine")
    with pytest.raises(TraceError, match="not replaced"):
        write_trace(tiny_trace(), tmp_path / "kept")


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("acc/model", lambda c: c + 17),
        ("acc/ngram", lambda c: np.ones_like(c) * 16),
        ("offsets", lambda c: c[:-1]),
        ("tokens", lambda c: c.astype(np.float32)),
        ("finish", lambda c: c + 9),
        ("seed", lambda c: c[:1]),
    ],
)
def test_impossible_columns_are_refused(column: str, change: object) -> None:
    trace = tiny_trace()
    with pytest.raises(TraceError):
        Trace(trace.header, {**trace.columns, column: change(trace.columns[column])})  # type: ignore[operator]


def test_info_pack_and_errors_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tiny_trace(), tmp_path / "t.npz")
    assert main(["trace", "info", str(tmp_path / "t.npz")]) == 0
    out = capsys.readouterr().out
    assert "9 requests" in out and "model" in out and "ngram" in out
    assert main(["trace", "pack", str(tmp_path / "t.npz"), str(tmp_path / "f")]) == 0
    assert same(read_trace(tmp_path / "f"), tiny_trace())
    capsys.readouterr()
    assert main(["trace", "info", str(tmp_path / "no.npz")]) == 2
    assert main(["trace", "look"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2


def line(**changes: object) -> str:
    value = {
        "id": "q1",
        "prompt_token_ids": [1, 2, 3],
        "generated_token_ids": [7, 8, 9, 7, 8],
        "acc_eagle": {"acc_len": [3, 1, 2, 1, 1]},
        "acc_ngram": {"acc_len": [1, 1, 1, 40, 1]},
    }
    return json.dumps({k: v for k, v in {**value, **changes}.items() if v is not None})


def test_import_counts_the_bonus_token(tmp_path: Path) -> None:
    source = tmp_path / "public.jsonl"
    source.write_text(line() + "\n\n" + line(id="q2", category="math") + "\n")
    assert main(["trace", "import", str(source), "--out", str(tmp_path / "t.npz")]) == 0
    trace = read_trace(tmp_path / "t.npz")
    assert trace.columns["acc/eagle"].tolist() == [2, 0, 1, 0, 0] * 2
    assert trace.columns["acc/ngram"].tolist() == [0, 0, 0, 2, 0] * 2, "no more than the text has"
    assert [d.keeps for d in trace.header.drafters] == ["drafts", "nothing"]
    assert trace.columns["category"].tolist() == ["", "math"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1"),
        (line(generated_token_ids=None), "line 1 lacks 'generated_token_ids'"),
        (line(**{"acc_eagle": None, "acc_eagle.acc_len": [1] * 6}), "line 1 has"),
        (line() + "\n" + line(acc_ngram=None), "line 2 has the drafters"),
        ("", "no trace line"),
        ("[1]", "line 1"),
    ],
)
def test_bad_import_lines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    source = tmp_path / "public.jsonl"
    source.write_text(text)
    assert main(["trace", "import", str(source), "--out", str(tmp_path / "t.npz")]) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.strip().splitlines()) == 1
