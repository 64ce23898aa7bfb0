"""Every mistake a user can make is an `AsscError`: one sentence that names what was wrong and what is allowed.

Command lines print the sentence and exit with code 2 (`assc.cli.run_cli`); library callers catch the class.
"""

from __future__ import annotations


class AsscError(Exception):
    """Base of all errors caused by input rather than by a fault of the program."""


class SpecError(AsscError):
    """A spec string (policy, drafter) that cannot be read or names something unknown."""


class RequestError(AsscError):
    """A request that cannot be decoded: empty prompt, negative budget, K above K_max, ..."""


class WorkloadError(AsscError):
    """A workload file with a missing, malformed or empty part; the message names the line."""


class PairError(AsscError):
    """A model pair that cannot be found, loaded or matched."""


class UnsupportedModelError(PairError):
    """A model whose state the decoder cannot roll back, so its output could not be trusted."""


class TraceError(AsscError):
    """A trace that is missing, damaged, of another version, or cannot answer what was asked of it."""


class ArtefactError(AsscError):
    """A saved policy that is damaged, of another version, or made for other spaces."""
