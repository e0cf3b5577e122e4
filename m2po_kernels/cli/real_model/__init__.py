"""A real language model, its rollouts on a verifiable task, and the updates that make them stale. Needs the extra `smollm2`."""
