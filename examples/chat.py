"""A conversation of two questions; the answers are printed as they come."""

import os

import openai

URL = os.environ.get("JAXSERVE_URL", "http://127.0.0.1:8000")
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("JAXSERVE_KEY", "none"))
model = client.models.list().data[0].id
messages = []
for question in ("def fibonacci(n):", "And faster?"):
    messages.append({"role": "user", "content": question})
    answer = ""
    for chunk in client.chat.completions.create(
        model=model, messages=messages, max_tokens=48, temperature=0.6, stream=True
    ):
        for choice in chunk.choices:
            answer += choice.delta.content or ""
            print(choice.delta.content or "", end="", flush=True)
    print()
    messages.append({"role": "assistant", "content": answer})
