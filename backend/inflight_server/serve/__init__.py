"""``inflight serve``: find a tritonserver, give it our model repository, watch it, stop it cleanly.

`command` is the command line, `launcher` the story from start to stop, the rest its tools.
"""
