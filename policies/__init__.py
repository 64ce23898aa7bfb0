"""Controllers of K. Importing this package registers all of them, and the reader of saved policies."""

from policies import ar, artefact, assc_rule, bandit, random_k, static, threshold

__all__ = ["ar", "artefact", "assc_rule", "bandit", "random_k", "static", "threshold"]
