"""Guided decoding: an answer can only be what its request's grammar allows.

`guide` holds the kinds of guides, `compiler` compiles them on threads of its own, `matchers` are
the compiled guides of the two libraries, and `masks` says at each step which tokens may come next.
llguidance follows JSON, JSON schemas and regular expressions, xgrammar EBNF grammars; both are
imported when a guide needs them first.
"""
