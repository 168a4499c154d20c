"""Guided decoding: an answer can only be what its request's grammar allows.

`guide` reads what a request asks for, `grammar` turns it into a grammar of llguidance within
bounds, `compiler` compiles grammars on threads of its own, and `masks` says step by step which
tokens may come next. Only `grammar` and `compiler` import llguidance, and only when it is needed.
"""
