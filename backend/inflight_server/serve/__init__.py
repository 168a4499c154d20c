"""``inflight serve``: find a tritonserver, give it our model repository, watch it, stop it cleanly.

`launcher` runs one server from start to stop with the help of the other modules; the command line
is `inflight_server.commands.serve`.
"""
