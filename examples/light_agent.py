"""An agent of the OpenAI Agents SDK, which calls a tool and then answers; twice, as one session."""

import os

import openai
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled as without_tracing

URL = os.environ.get("JAXSERVE_URL", "http://127.0.0.1:8000")
client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("JAXSERVE_KEY", "none"))
without_tracing(True)


@function_tool
def light(on: bool) -> str:
    """Switches the light."""
    print("light", on)
    return "on" if on else "off"


agent = Agent(
    name="house",
    model=OpenAIResponsesModel("demo", client),
    tools=[light],
    # After a call the SDK lets the model choose, and the demo answers. The SDK takes an answer that
    # met its limit of tokens for an error, and the demo seldom ends by itself.
    model_settings=ModelSettings(
        tool_choice="required",
        temperature=0.6,
        extra_body={"stop": [".", ")", "\n\n"], "repetition_penalty": 1.2},
    ),
)
last = None
for question in ("Light, please.", "And now?"):
    result = Runner.run_sync(agent, question, previous_response_id=last, max_turns=4)
    last = result.last_response_id
    print(repr(result.final_output[:60]))
