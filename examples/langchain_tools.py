"""A LangChain model: a tool that it has to call, its result, and a structured answer."""

import os

import pydantic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL = os.environ.get("JAXSERVE_URL", "http://127.0.0.1:8000")
key = os.environ.get("JAXSERVE_KEY", "none")


class Answer(pydantic.BaseModel):
    """Whether to go out."""

    outside: bool


@tool
def light(on: bool) -> str:
    """Switches the light."""
    return "on" if on else "off"


model = ChatOpenAI(model="demo", base_url=f"{URL}/v1", api_key=key, max_tokens=64)
messages = [HumanMessage("Light, please.")]
for _ in range(2):
    asked = model.bind_tools([light], tool_choice="any").invoke(messages)
    messages += [asked, light.invoke(asked.tool_calls[0])]
    print(asked.tool_calls[0]["args"], "→", messages[-1].content)
print(model.with_structured_output(Answer).invoke("Shall I go out?"))
