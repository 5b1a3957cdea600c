"""rollout-lake's library: sessions, token assembly, parity and the way of a batch. Imports no Prefect."""

__version__ = "0.1.0"
