"""Tools: what the client offers, what the model writes to call one, and back.

`formats` is the table of what models of each family write, and the guides of it; `reader` splits an
answer into thoughts, text and calls as it arrives, with a grammar of its own in `tagged`,
`pythonic`, `xml_calls` and `harmony`.
"""
