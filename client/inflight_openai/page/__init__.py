"""The live page: what the server does now, drawn, and a chat to try it."""
