"""An answer that is a Pydantic model: the schema decides which tokens may come."""

import os
from typing import Literal

import openai
import pydantic

URL = os.environ.get("JAXSERVE_URL", "http://127.0.0.1:8000")


class Review(pydantic.BaseModel):
    """What the answer says."""

    mood: Literal["good", "bad"]
    stars: int = pydantic.Field(ge=1, le=5)


client = openai.OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("JAXSERVE_KEY", "none"))
chat = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "The soup was cold."}],
    response_format=Review,
    max_tokens=64,
)
print(chat.choices[0].message.parsed)
