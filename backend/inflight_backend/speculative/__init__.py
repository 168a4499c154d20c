"""Speculative decoding without a draft model; verification is the scheduler's."""
