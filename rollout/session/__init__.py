"""The session server: one agent conversation per session, v1 linear or v2 tree."""
