"""Client of an inflight server, and the table of the wire (`inflight_client.protocol`)."""
