"""Engines: the client, the embedded server and the tiny checkpoint."""
