"""``/v1/responses``: `request` makes a chat of a body, `writer` a response of its answer."""
