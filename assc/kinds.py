"""Which drafter of a table is which: an action table knows names only, so their names decide."""

from __future__ import annotations

from assc.actions import ActionTable

LOOKUP_PREFIXES = ("ngram", "suffix", "lookup", "copy", "pld")
"""drafters that look text up are named after their kind; everything else is taken for a model with confidences"""


def is_lookup(name: str) -> bool:
    """Whether a drafter of this name proposes by looking text up, so that it can be without a proposal.

    >>> is_lookup("ngram"), is_lookup("suffix2"), is_lookup("model"), is_lookup("hidden")
    (True, True, False, False)
    """
    return name.startswith(LOOKUP_PREFIXES)


def first_lookup(table: ActionTable) -> str | None:
    """The first drafter that looks text up, None if there is none."""
    return next((d for d in table.drafters if is_lookup(d)), None)


def first_model(table: ActionTable) -> str | None:
    """The first drafter that is a model, None if there is none."""
    return next((d for d in table.drafters if not is_lookup(d)), None)
