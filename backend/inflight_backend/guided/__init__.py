"""Guided decoding: an answer can only be what its request's grammar allows.

`guide` holds the kinds of guides and the bounds that no library has, `compiler` compiles guides on
threads of its own, and `masks` says at each step which tokens may come next. llguidance follows
JSON, JSON schemas and regular expressions, xgrammar EBNF grammars; both are imported when a guide
needs them first.
"""
