"""Gemma."""
