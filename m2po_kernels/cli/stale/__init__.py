"""`m2po stale`: a small transformer trained on rollouts from k updates ago, under five rules for what stale tokens may do."""
