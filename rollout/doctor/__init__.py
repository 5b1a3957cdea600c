"""`rollout doctor`: is everything there that a batch needs? Looks only; what it writes to look, it removes."""
