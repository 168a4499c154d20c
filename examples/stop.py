"""Stop a running request by its id, as any client of the server may.

python examples/stop.py [host:port]
"""

import sys

from inflight_client import InflightClient

text = ""
with InflightClient(*sys.argv[1:]) as client:
    for chunk in client.stream("1 2 3", 4000, request_id="long"):
        print(chunk.text, end="", flush=True)
        text += chunk.text
        if text.endswith("20"):
            client.stop("long")  # the answer ends with an ordinary final response
print("\nstopped")
