"""Which drafter of a table is which (`assc.kinds`)."""

from __future__ import annotations

from assc.kinds import LOOKUP_PREFIXES, first_lookup, first_model, is_lookup

__all__ = ["LOOKUP_PREFIXES", "first_lookup", "first_model", "is_lookup"]
