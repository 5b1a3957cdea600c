"""An agent and a reward of your own for rollout-lake."""
