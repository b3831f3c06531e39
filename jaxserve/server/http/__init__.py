"""The HTTP face: the endpoints that OpenAI's clients speak, on uvicorn and starlette."""
