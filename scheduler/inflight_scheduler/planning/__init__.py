"""Carries a decision out: slots, blocks and tokens of a step."""
