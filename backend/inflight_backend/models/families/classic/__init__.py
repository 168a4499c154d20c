"""Families from before Llama: learned positions, ALiBi, interleaved or partial rotations."""
