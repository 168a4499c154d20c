"""Which request holds which block."""
