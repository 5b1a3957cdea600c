"""The agent contract and the built-in agents."""
