"""Call a function whenever torch compiles something, by a private hook of ``torch._dynamo``."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch._dynamo.callback import callback_handler  # Lightning has imported it


def on_compilation(function: Callable[[], object]) -> Callable[[], None]:
    """Call a function at the start of each compilation; return a function that ends these calls."""

    def begins(*_: Any) -> None:  # no argument in torch 2.6, one in later versions
        function()

    callback_handler.register_start_callback(begins)

    def end() -> None:
        with suppress(ValueError):  # torch.compiler.reset() has removed it
            callback_handler.remove_start_callback(begins)

    return end
