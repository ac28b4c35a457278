"""Tell when torch compiles something, whoever asked for it: ``torch._dynamo`` has hooks for it."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch._dynamo.callback import callback_handler  # Lightning has imported it


def on_compilation(function: Callable[[], object]) -> Callable[[], None]:
    """Call a function whenever a compilation begins; calling what is returned ends that."""

    def begins(*_: Any) -> None:  # no argument in torch 2.6, one in later versions
        function()

    callback_handler.register_start_callback(begins)

    def end() -> None:
        with suppress(ValueError):  # torch.compiler.reset() has removed it
            callback_handler.remove_start_callback(begins)

    return end
