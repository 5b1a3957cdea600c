"""What a batch is made of: prompts, plan, shards, summary."""
