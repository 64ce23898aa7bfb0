"""JSON that was written by others: read, cleaned, and taken apart part by part, or refused with one sentence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assc.errors import AsscError

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class ResultError(AsscError):
    """A file that is no result, or results that don't belong together."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, cleaned. `ResultError` where there is none."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except FileNotFoundError:
        raise ResultError(f"there is no result at {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ResultError(f"{path} is damaged or no JSON ({error})") from None
    if not isinstance(data, dict):
        raise ResultError(f"{path} is not a result of eval.py or train_policy.py")
    cleaned: dict[str, Any] = clean(data)
    return cleaned


def _no_constant(name: str) -> float:
    raise ValueError(f"it has the number {name}")


def clean(value: Any) -> Any:
    r"""The same with characters that no page can show replaced.

    >>> clean({"a\x00": ["b\ud800", 1]})
    {'a�': ['b�', 1]}
    """
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\ufffd", value)
    if isinstance(value, list):
        return [clean(v) for v in value]
    if isinstance(value, dict):
        return {clean(k): clean(v) for k, v in value.items()}
    return value


class Checked:
    """A file of which every part is checked, so that what comes later can rely on it."""

    def __init__(self, path: Path, data: dict[str, Any] | None = None) -> None:
        """Read `path`, unless its content is given."""
        self.path, self.data = path, read_object(path) if data is None else data

    def refuse(self, what: str) -> ResultError:
        return ResultError(f"{self.path} is no result of eval.py, or a damaged one: {what}")

    def get(self, holder: Any, key: str, kind: type[Any] | tuple[type[Any], ...], where: str) -> Any:
        value = holder.get(key) if isinstance(holder, Mapping) else None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.refuse(f"{where} has no proper {key!r}")
        return value

    def number(self, holder: Any, key: str, where: str, *, needed: bool = False) -> float | None:
        """A finite number; None for one that is missing or null unless it is `needed`."""
        if not needed and isinstance(holder, Mapping) and holder.get(key) is None:
            return None
        value = self.get(holder, key, (int, float), where)
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        if not finite:
            raise self.refuse(f"{key!r} of {where} is not finite")
        return value  # type: ignore[no-any-return]

    def needed(self, holder: Any, key: str, where: str) -> float:
        value = self.number(holder, key, where, needed=True)
        assert value is not None
        return value
