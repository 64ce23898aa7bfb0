"""Result files in, checked: what `eval.py --json` and `train_policy.py` wrote, old files included, and nothing else."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assc.manifest import MANIFEST
from assc.metrics import ROW_KEYS
from assc.report.checked import ResultError, read_object
from assc.report.load_rounds import RoundsReader
from assc.report.nouns import PHASES, Bin, Entry, Guarded, Learned, Played, Reliability, Result, Row

EVAL_FILE, CONFIG_FILE, LIVE_FILE, CURVES = "eval.json", "config.json", "live.json", "tb"
"""what a run directory holds"""
NUMBERS = tuple(k for k in ROW_KEYS if k not in ("policy", "speedup_ci95", "action", "time_source", "rung"))


def read_result(path: Path) -> Result:
    """A run directory or a JSON file. `ResultError` with one sentence for anything that is not a result."""
    if path.is_dir():
        file = path / EVAL_FILE
        if not file.is_file():
            raise ResultError(f"{path} has no {EVAL_FILE}: it is no finished run of train_policy.py")
        config, live, curves = path / CONFIG_FILE, path / LIVE_FILE, path / CURVES
        return _Reader(file).result(
            str(path),
            training=read_object(config) if config.is_file() else {},
            live=_Reader(live).live() if live.is_file() else None,
            curves=str(curves) if curves.is_dir() else None,
            manifest=read_object(path / MANIFEST) if (path / MANIFEST).is_file() else {},
        )
    return _Reader(path).result(str(path))


def result_of(data: Mapping[str, Any], name: str) -> Result:
    """A result that is not in a file: what `Evaluation.to_json` gives."""
    return _Reader(Path(name), json.loads(json.dumps(data, allow_nan=False))).result(name)


class _Reader(RoundsReader):
    """The parts of a result."""

    def result(
        self,
        name: str,
        *,
        training: Mapping[str, Any] | None = None,
        live: Mapping[str, Any] | None = None,
        curves: str | None = None,
        manifest: Mapping[str, Any] | None = None,
    ) -> Result:
        meta = self.get(self.data, "meta", dict, "it")
        for key in ("mode", "time_source"):
            self.get(meta, key, str, "'meta'")
        same = self.data.get("same_text")
        return Result(
            name=name,
            meta=meta,
            entries=self.entries(),
            ladder=self.ladder(),
            same_text=same if isinstance(same, bool) else None,
            complete=self.data.get("complete") is not False,
            views=self.views(),
            training=training or {},
            live=live,
            curves=curves,
            against=self.against(),
            leakage=self.leakage(meta),
            hardware=hardware if isinstance(hardware := (manifest or {}).get("hardware"), dict) else {},
        )

    def row(self, raw: Any, where: str) -> Row:
        policy = self.get(raw, "policy", str, where)
        numbers = {key: self.number(raw, key, f"the row of {policy!r}") for key in NUMBERS}
        for key in ("tokens", "seconds", "rounds"):
            self.needed(raw, key, f"the row of {policy!r}")
        texts = {key: None if raw.get(key) is None else str(raw[key]) for key in ("action", "time_source", "rung")}
        values: dict[str, Any] = {
            **numbers,
            "policy": policy,
            "speedup_ci95": self.interval(raw, "speedup_ci95", where),
            **texts,
        }
        return {key: values[key] for key in ROW_KEYS}

    def entries(self) -> tuple[Entry, ...]:
        rows = self.get(self.data, "rows", list, "it")
        if not rows:
            raise self.refuse("it has no rows")
        details = self.data.get("details") or [{}] * len(rows)
        if not isinstance(details, list) or len(details) != len(rows):
            raise self.refuse("'details' do not fit the rows")
        by_category = self.groups("by_category", "category", len(rows))
        by_temperature = {
            self.degrees(text): its for text, its in self.groups("by_temperature", "temperature", len(rows)).items()
        }
        found = []
        for i, (raw, detail) in enumerate(zip(rows, details, strict=True)):
            row = self.row(raw, f"row {i + 1}")
            where = f"the details of {row['policy']!r}"
            if not isinstance(detail, dict):
                raise self.refuse(f"{where} are missing")
            found.append(
                Entry(
                    label=str(detail.get("label") or row["policy"]),
                    result=0,
                    row=row,
                    phases={phase: self.number(detail, f"{phase}_seconds", where) for phase in PHASES},
                    categories={c: self.row(r[i], f"category {c!r}") for c, r in by_category.items()},
                    played=self.played(detail, where),
                    reliability=self.reliability(detail.get("accept_reliability"), where),
                    temperatures={t: self.row(r[i], f"temperature {t:g}") for t, r in by_temperature.items()},
                )
            )
        if len({e.label for e in found}) < len(found):
            raise self.refuse("two of its policies have the same label")
        if len({tuple(p.key for p in e.played) for e in found}) > 1:
            raise self.refuse("its policies have not played the same requests")
        return tuple(found)

    def groups(self, key: str, what: str, policies: int) -> Mapping[str, list[Any]]:
        """Name of a group -> one row per policy."""
        found = self.data.get(key) or {}
        if not isinstance(found, dict):
            raise self.refuse(f"{key!r} does not fit the rows")
        for name, its_rows in found.items():
            if not isinstance(its_rows, list) or len(its_rows) != policies:
                raise self.refuse(f"the rows of {what} {name!r} are not those of the table")
        return found

    def degrees(self, text: str) -> float:
        """A temperature that is a key."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self.refuse(f"{text!r} is no temperature")
        return value

    def against(self) -> str | None:
        """The reference of the last comparison, None where there is only plain decoding, or nothing in older files."""
        found = self.data.get("comparisons")
        last = found[-1] if isinstance(found, list) and len(found) > 1 else None
        return None if last is None else str(self.get(last, "against", str, "the last of 'comparisons'"))

    def leakage(self, meta: Mapping[str, Any]) -> Guarded | None:
        raw, where = meta.get("leakage"), "'leakage'"
        if raw is None:
            return None
        learned = [
            Learned(
                label=self.get(one, "label", str, where),
                how=self.get(one, "how", str, where),
                prompts=self.number(one, "prompts", where),
                leaked=self.number(one, "leaked_requests", where),
            )
            for one in self.get(raw, "policies", list, where)
        ]
        drafts = tuple(map(str, self.get(raw, "drafts", list, where)))
        return Guarded(tuple(learned), drafts, self.needed(raw, "evaluated", where))

    def played(self, detail: Mapping[str, Any], where: str) -> tuple[Played, ...]:
        raw = detail.get("requests") or []
        if not isinstance(raw, list):
            raise self.refuse(f"{where} have no proper 'requests'")
        seen: Counter[int] = Counter()
        found = []
        for one in raw:
            what = f"a request in {where}"
            repeat = int(self.number(one, "repeat", what) or 0)
            found.append(
                Played(
                    seen[repeat],
                    self.get(one, "id", str, what),
                    self.get(one, "category", str, what),
                    self.number(one, "temperature", what),
                    repeat,
                    self.needed(one, "tokens", what),
                    self.needed(one, "seconds", what),
                    self.needed(one, "baseline_tokens", what),
                    self.needed(one, "baseline_seconds", what),
                )
            )
            seen[repeat] += 1
        return tuple(found)

    def reliability(self, raw: Any, where: str) -> Reliability | None:
        if raw is None:
            return None
        what = f"'accept_reliability' in {where}"
        names = ("judged", "accepted_share", "brier", "brier_constant", "calibration_error")
        numbers = {name: self.needed(raw, name, what) for name in names}
        bins = [
            Bin(
                judged=self.needed(one, "judged", what),
                predicted=self.needed(one, "predicted", what),
                accepted=self.needed(one, "accepted", what),
                interval=self.interval(one, "accepted_ci95", what),
            )
            for one in self.get(raw, "bins", list, what)
        ]
        return Reliability(**numbers, bins=tuple(bins))

    def interval(self, holder: Any, key: str, where: str) -> tuple[float | None, float | None]:
        """Both ends of an interval, each a finite number or None."""
        ends = (holder.get(key) if isinstance(holder, Mapping) else None) or [None, None]
        if not isinstance(ends, list) or len(ends) != 2:
            raise self.refuse(f"{where} has no proper {key!r}")
        low, high = (self.number({"end": end}, "end", f"the interval of {where}") for end in ends)
        return low, high

    def ladder(self) -> Mapping[str, Row | None] | None:
        raw = self.data.get("ladder")
        if raw is None:
            return None
        rungs: dict[str, Row | None] = {}
        for key in ("plain", "tuned", "best_static_per_request", "oracle"):
            rung = raw.get(key) if isinstance(raw, dict) else None
            where = f"the rung {key!r} of the ladder"
            if rung is None and key == "tuned":
                rungs[key] = None
                continue
            names = ("tokens_per_second", "speedup", "seconds", "tokens")
            if not isinstance(rung, dict):
                raise self.refuse(f"{where} is missing")
            numbers = {name: self.needed(rung, name, where) for name in names}
            fraction = self.number(rung, "oracle_fraction", where)
            rungs[key] = {**numbers, "oracle_fraction": fraction, "action": rung.get("action") and str(rung["action"])}
        return rungs

    def live(self) -> Mapping[str, Any]:
        """The check on the live decoder: counts, and the row of the policy live and in replay."""
        found: dict[str, Any] = {"policy": self.get(self.data, "policy", str, "it")}
        for key in ("requests", "same_text", "rounds", "same_rounds"):
            found[key] = self.needed(self.data, key, "it")
        for key in ("live", "replay"):
            row = self.get(self.data, key, dict, "it")
            names = ("speedup", "acceptance_rate", "mean_k", "rounds", "seconds", "tokens")
            interval = self.interval(row, "speedup_ci95", repr(key))
            found[key] = {**{n: self.number(row, n, f"{key!r}") for n in names}, "speedup_ci95": interval}
        meta = self.data.get("meta")
        found["meta"] = meta if isinstance(meta, dict) else {}
        return found
