"""Arithmetic on blocks: the operations an engine is made of."""
