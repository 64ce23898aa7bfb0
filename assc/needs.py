"""What a policy may list in `Policy.needs`, by who has to be asked for it."""

from __future__ import annotations

from assc.steps import STEP_FIELDS

DRAFT_FIELDS = frozenset({"draft_entropy", "draft_top1", "draft_margin"})
"""of the draft's next distribution: they cost its first forward, the peek"""
TARGET_FIELDS = frozenset({"target_entropy", "target_top1"})
"""of the distribution that the last committed token came from"""
STEP_NEEDS = frozenset(STEP_FIELDS)
"""of the distribution that each drafted token came from"""
