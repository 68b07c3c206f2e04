"""Options as the keyword arguments of whoever takes them, with names, types and defaults."""

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate


def unpack_options[**Fields, Options, Instance](
    options: Callable[Fields, Options],
) -> Callable[[Callable[[Instance, Options], None]], Callable[Concatenate[Instance, Fields], None]]:
    """Decorator of an `__init__` that takes options, to be called with their fields instead.

    Args:
        options: the options' class.
    """

    def decorate(
        init: Callable[[Instance, Options], None],
    ) -> Callable[Concatenate[Instance, Fields], None]:
        own, *_ = inspect.signature(init).parameters.values()
        parameters = [own, *inspect.signature(options).parameters.values()]
        signature = inspect.Signature(parameters, return_annotation=None)

        @functools.wraps(init)
        def unpacking(self: Instance, *args: Fields.args, **fields: Fields.kwargs) -> None:
            signature.bind(self, *args, **fields)  # its errors do not name the options' class
            init(self, options(*args, **fields))

        vars(unpacking)["__signature__"] = signature
        return unpacking

    return decorate
