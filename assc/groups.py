"""Chunked verification: K drafted tokens are judged group by group, until a group holds the end of the round.

K tokens in m groups have sizes that differ by one at most, larger ones first. The forward of a group feeds one column
per token of the group that it judges: the token before it. The first therefore begins with the last committed token,
and the last group feeds its last token too, whose column gives the bonus token. All groups together feed K + 1 columns,
as one verification does, and the rule that accepts is the same, so the text is too.

A round ends in the group in which a token is rejected or an end token is accepted; the tokens of later groups are
`discarded`. That group is the first that reaches as many tokens as were committed.
"""

from __future__ import annotations

from assc.errors import RequestError

K_LIMIT = 100
"""the largest K_max anywhere: traces store accepted lengths, one more included, in a signed byte"""


def group_sizes(k: int, chunks: int) -> tuple[int, ...]:
    """Tokens of each group of `k` drafted tokens; one empty group for none.

    >>> group_sizes(8, 3), group_sizes(2, 4), group_sizes(0, 4)
    ((3, 3, 2), (1, 1), (0,))
    """
    m = max(1, min(k, chunks))
    return tuple(k // m + (i < k % m) for i in range(m))


def group_columns(k: int, chunks: int) -> tuple[int, ...]:
    """Columns that the forward of each group feeds.

    >>> group_columns(8, 3), group_columns(0, 3)
    ((3, 3, 3), (1,))
    """
    *first, last = group_sizes(k, chunks)
    return (*first, last + 1)


def played_groups(k: int, chunks: int, emitted: int) -> tuple[int, ...]:
    """Columns of the forwards of a round that proposed `k` tokens and committed `emitted` (1..k + 1).

    >>> played_groups(8, 2, 4), played_groups(8, 2, 5), played_groups(8, 2, 9), played_groups(8, 1, 1)
    ((4,), (4, 5), (4, 5), (9,))
    """
    columns = group_columns(k, chunks)
    reached = 0
    for i, size in enumerate(columns):
        reached += size
        if reached >= emitted:
            return columns[: i + 1]
    raise ValueError(f"a round that proposed {k} tokens commits 1 to {k + 1}, not {emitted}")


def judged(k: int, groups: tuple[int, ...]) -> int:
    """How many of `k` proposed tokens the forwards over these columns judge."""
    return min(k, sum(groups))


def check_k_max(k_max: int) -> None:
    """`RequestError` for a K_max that cannot be."""
    if not 1 <= k_max <= K_LIMIT:
        raise RequestError(f"K_max is {k_max}, allowed is 1 to {K_LIMIT}")


def check_chunks(chunks: int, k_max: int) -> None:
    """`RequestError` for a number of groups that makes no sense."""
    if isinstance(chunks, bool) or not isinstance(chunks, int) or not 1 <= chunks <= k_max:
        raise RequestError(f"the number of verification groups is {chunks!r}, allowed is 1 (at once) to K_max={k_max}")
