"""Families with an encoder that reads the prompt."""
