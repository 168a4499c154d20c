"""Mixtures of experts, but those of a line that has dense models too."""
