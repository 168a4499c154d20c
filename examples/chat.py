"""Chat through OpenAI's API: inflight serve --model FOLDER, then this.

python examples/chat.py [http://localhost:9000/v1]
"""

import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:9000/v1"
client = OpenAI(base_url=base_url, api_key="none")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "1 2 3"}],
    max_tokens=40,
    stream=True,
)
for event in stream:
    if event.choices:
        print(event.choices[0].delta.content or "", end="", flush=True)
print()
