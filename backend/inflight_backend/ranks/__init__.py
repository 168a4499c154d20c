"""Several ranks that run one model: the worker processes, and the first rank that leads them."""
