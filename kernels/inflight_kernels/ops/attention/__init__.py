"""Attention over the paged KV cache, recurrences, and what writes and moves blocks."""
