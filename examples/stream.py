"""Stream an answer as it is generated: python examples/stream.py "1 2 3" [host:port]."""

import sys

from inflight_client import InflightClient

prompt, *url = sys.argv[1:]
with InflightClient(*url) as client:
    for chunk in client.stream(prompt, 40, temperature=0.0):
        print(chunk.text, end="", flush=True)
print()
