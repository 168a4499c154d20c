"""Start a server, watch it, and explain what it decided."""
