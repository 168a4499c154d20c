"""Commands of ``inflight`` that explain the scheduler; each is one entry point.

Importing them is light: no torch, no server.
"""
