"""What a loss divides by, read from its graph.

``_saved_...`` attributes of a graph's nodes are what torch keeps for the backward pass; they are
documented ("Autograd mechanics"), and which ones a node has is not. Seen in torch 2.6 to 2.13;
where a node is another one, nothing is said of it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PRIVATE = {
    "harness.upstream.loss_graph:example()": "_saved_total_weight _saved_self _saved_reduction "
    "_saved_self_sym_numel _saved_self_sym_sizes _saved_other",
}

# What leaves a loss one number, or only moves it.
THROUGH = {"AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0", "NanToNumBackward0"}
THROUGH |= {"WhereBackward0", "SqueezeBackward0", "SqueezeBackward1", "StackBackward0"}
THROUGH |= {"ViewBackward0", "UnsqueezeBackward0", "CatBackward0", "CloneBackward0"}
PRODUCTS = {"MulBackward0", "DivBackward0", "MulBackward1", "DivBackward1"}
# And what changes the number on its way.
CHANGING = {"RsubBackward1", "PowBackward0", "LogBackward0", "ClampMinBackward0", "ClampBackward1"}
MOST_NODES = 200


class Term(NamedTuple):
    """A part of a loss that is summed over something, and what the sum is divided by."""

    name: str  # of the node
    denominator: float
    num_classes: int | None = None  # of a cross-entropy
    num_rows: int | None = None  # of what is summed, where nothing has counted it


def terms_of(loss: Tensor, declared: list[Any]) -> list[Term]:
    """The terms of a loss whose denominators can be read; waits for the device.

    Args:
        loss: one number with a graph.
        declared: nodes of terms whose weight is known, which are left out.
    """
    found: list[Term] = []
    nodes: list[tuple[Any, float]] = [(loss.grad_fn, 1.0)]
    num_nodes = 0
    while nodes and num_nodes < MOST_NODES:
        num_nodes += 1
        node, factor = nodes.pop()
        if node is None or any(node is term for term in declared):
            continue
        name, further = node.name(), [following for following, _ in node.next_functions]
        if name in PRODUCTS:
            other = _one_number(getattr(node, "_saved_other", None))
            other = _one_number(getattr(node, "_saved_self", None)) if other is None else other
            factor *= (other or 1.0) if name.startswith("Mul") else 1 / (other or 1.0)
            nodes += [(following, factor) for following in further]
        elif name in THROUGH:
            nodes += [(following, factor) for following in further]
        elif name.startswith(("Sum", "Mean")):
            size = node._saved_self_sym_numel if name.startswith("Mean") else 1
            if any(one is not None and one.name() == "StackBackward0" for one in further):
                nodes += [(following, factor / size) for following in further]
            else:
                rows = [*node._saved_self_sym_sizes, None][0] if name.startswith("Sum") else None
                found.append(Term(name, size / factor, None, rows))
        elif (kind := getattr(node, "_saved_reduction", None)) in (1, 2):
            values, size, classes, rows = node._saved_self, 1.0, None, None
            if kind == 2:
                rows = len(values) if values.dim() else None
            else:
                weight = getattr(node, "_saved_total_weight", None)
                size = float(values.numel() if weight is None else weight)
                classes = None if weight is None else values.shape[1 if values.dim() > 1 else 0]
            found.append(Term(name, size / factor, classes, rows))
    return found


def is_ratio_of_sums(loss: Tensor, declared: list[Any], num_samples: int) -> bool:
    """Whether a loss divides by a sum over the samples that is computed from weights, as Dice does.

    Args:
        loss: one number with a graph.
        declared: nodes of terms whose weight is known, which are left out.
        num_samples: of the batch.
    """
    for node in _above_samples(loss.grad_fn, num_samples, declared):
        below = getattr(node, "_saved_other", None) if node.name() == "DivBackward0" else None
        if isinstance(below, Tensor) and below.requires_grad:
            is_of_samples = below.dim() > 0 and len(below) == num_samples
            if not is_of_samples and _sums_samples(node.next_functions[1][0], num_samples):
                return True
    return False


def _above_samples(node: Any, num_samples: int, left_out: list[Any]) -> Iterator[Any]:
    """The nodes of a graph down to those that sum over samples, or are of another kind."""
    nodes, num_nodes = [node], 0
    while nodes and num_nodes < MOST_NODES:
        node, num_nodes = nodes.pop(), num_nodes + 1
        if node is None or any(node is one for one in left_out):
            continue
        yield node
        is_sum = node.name().startswith(("Sum", "Mean"))
        is_small = is_sum and not _is_of_samples(node, num_samples)
        if is_small or node.name() in THROUGH | PRODUCTS | CHANGING:
            nodes += [following for following, _ in node.next_functions]


def _is_of_samples(node: Any, num_samples: int) -> bool:
    """Whether a sum's values are of each sample, also in one row."""
    sizes = [*node._saved_self_sym_sizes] if hasattr(node, "_saved_self_sym_sizes") else []
    return bool(sizes) and (
        sizes[0] == num_samples or (len(sizes) == 1 and sizes[0] % num_samples == 0)
    )


def _sums_samples(node: Any, num_samples: int) -> bool:
    """Whether a sum over samples is part of a number, and not over those of all processes."""
    for one in _above_samples(node, num_samples, []):
        if one.name().startswith(("Sum", "Mean")) and _is_of_samples(one, num_samples):
            nodes, seen = [one], 0
            while nodes and seen < MOST_NODES:
                below, seen = nodes.pop(), seen + 1
                if below is not None and "AllGather" in below.name():
                    return False
                nodes += (
                    [] if below is None else [following for following, _ in below.next_functions]
                )
            return True
    return False


def _one_number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.requires_grad else None
    return float(value) if isinstance(value, (int, float)) else None


class Nodes:
    """Has the attributes of all examples."""


def example() -> Any:
    """What the nodes of some losses have."""
    values = torch.ones(2, 3, requires_grad=True)
    losses = (F.cross_entropy(values, torch.tensor([0, 1])), values.mean(), values.sum() / 2)
    nodes = Nodes()
    vars(nodes).update({name: None for loss in losses for name in dir(loss.grad_fn)})
    return nodes
