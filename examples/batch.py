"""Several prompts in one request; then a conversation that goes on by the id of its last answer."""

import os

import openai

URL = os.environ.get("JAXSERVE_URL", "http://127.0.0.1:8000")
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("JAXSERVE_KEY", "none"))
model = client.models.list().data[0].id
prompts = ["import os\n", "class Tree:\n", "def add(a, b):\n"]
done = client.completions.create(model=model, prompt=prompts, n=2, max_tokens=16, temperature=0.6)
for choice in done.choices:
    print(repr(prompts[choice.index // 2]), "→", repr(choice.text))
first = client.responses.create(model=model, input="def f():", max_output_tokens=16)
second = client.responses.create(
    model=model, input="def g():", max_output_tokens=16, previous_response_id=first.id
)
print(second.previous_response_id, repr(second.output_text))
