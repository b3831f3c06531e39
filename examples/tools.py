"""Three turns with a tool: two calls that the model has to make, then an answer."""

import json
import os

import openai

URL = os.environ.get("JAXSERVE_URL", "http://127.0.0.1:8000")
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("JAXSERVE_KEY", "none"))
model = client.models.list().data[0].id
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "celsius": {"type": "boolean"}},
            "required": ["city", "celsius"],
        },
    },
}


def weather(city: str, celsius: bool) -> str:
    """Stands for a service."""
    return f"{city}: {'7 °C' if celsius else '45 °F'}"


messages = [{"role": "user", "content": "How is the weather?"}]
for choice in ("required", "required", "none"):
    message = (
        client.chat.completions.create(
            model=model, messages=messages, tools=[TOOL], tool_choice=choice, max_tokens=64
        )
        .choices[0]
        .message
    )
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        result = weather(**json.loads(call.function.arguments))
        print(call.function.name, call.function.arguments, "→", result)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
