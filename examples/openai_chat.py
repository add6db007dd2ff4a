"""Stream a chat answer through the `openai` package: python examples/openai_chat.py QUESTION"""

import sys

from openai import OpenAI

question = " ".join(sys.argv[1:]) or "What is the capital of France?"
client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="unused")
model = next(iter(client.models.list())).id
answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=200, stream=True
)
for chunk in answer:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
