"""Explains the scheduler: records what it decides, runs it again, says why, draws it.

Pure Python, no torch and no numpy; a recording can be read on any machine.
"""
