"""The OpenAI API as plain data: bodies to requests, and outputs to bodies. Runs no model.

Decisions:
* Null means the same as left out. A field that is not known is refused by name, and so is a value
  that cannot be honoured: what is asked for is done or an error.
* `user`, `metadata`, `store` and `service_tier` are accepted and change nothing.
* vLLM's further sampling fields have vLLM's names.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving.openai_protocol.chat import read_chat_request
from serving.openai_protocol.common import APIRequest, RequestError
from serving.openai_protocol.completion import read_completion_request
from serving.openai_protocol.strict_json import is_unicode, read_json

ROUTES: Mapping[str, Callable[[Any, Sequence[str]], APIRequest]] = {
    "/v1/chat/completions": read_chat_request,
    "/v1/completions": read_completion_request,
}
"""Parsers of the bodies of requests, by route."""

__all__ = [
    "ROUTES",
    "APIRequest",
    "RequestError",
    "is_unicode",
    "read_chat_request",
    "read_completion_request",
    "read_json",
]
