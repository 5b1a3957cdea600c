"""The user-facing batch flows; no logic lives here."""
