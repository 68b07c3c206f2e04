"""Bodies of requests that most tests of the protocol begin with."""

from typing import Any

from serving.openai_protocol import APIRequest, read_chat_request, read_completion_request

NAMES = ["path/to/tiny", "tiny"]
USER = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]


def chat(**fields: Any) -> APIRequest:
    return read_chat_request({"messages": USER, **fields}, NAMES)


def complete(**fields: Any) -> APIRequest:
    return read_completion_request({"prompt": "x", **fields}, NAMES)
