"""Streams of requests whose regime changes, and how fast policies notice: `python -m assc drift` (docs/drift.md)."""
