"""What is put in the place of a value that only the code of its author could build."""

from typing import Any, NoReturn

from harness.errors import UserError

LONGEST_NAME = 200  # characters; a damaged or hostile file may give a long one

# What Python looks up in the type when a value is used. Without these an author's code would get
# "true", "not equal" or a text of ours, and go on with it.
KEPT = {"class", "doc", "getattribute", "hash", "init", "init_subclass", "new", "repr"}
KINDS = (bytes, complex, dict, float, int, list, set, str)
USES = {name.strip("_") for kind in KINDS for name in dir(kind) if name.startswith("__")} - KEPT
USES |= {"call", "enter", "exit", "fspath", "matmul", "next", "rmatmul"}


class StandIn:
    """Names a value of a checkpoint that was not built. Nothing can be done with it.

    Raises:
        UserError: whenever its value is asked for: no code goes on with a wrong one.
    """

    __slots__ = ("_type_name",)
    _type_name: str

    def __init__(self, type_name: str) -> None:
        object.__setattr__(self, "_type_name", type_name[:LONGEST_NAME])

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # which isinstance() asks for
            return type(self)
        refuse(self)

    def __repr__(self) -> str:
        return f"<a {type_name(self)} that was not built>"

    __hash__ = object.__hash__  # by identity: it may be a key of a dict


def type_name(stand_in: StandIn) -> str:
    """The name of the class, or of the function, that would have built the value."""
    name: str = object.__getattribute__(stand_in, "_type_name")
    return name


def refuse(stand_in: StandIn, *_: Any, **__: Any) -> NoReturn:
    """Say that a value is not there."""
    raise UserError(
        f"A {type_name(stand_in)} of the checkpoint is needed here, and was not built: that would "
        "run code which the file names.\nKeep numbers, text, lists, dicts, tensors or NumPy arrays "
        "in the checkpoint instead, and build the object from them."
    )


for use in USES:
    setattr(StandIn, f"__{use}__", refuse)
