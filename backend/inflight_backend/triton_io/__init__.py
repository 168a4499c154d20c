"""One Triton request and its answer."""
