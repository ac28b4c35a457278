"""Warnings of Lightning and torch that are not about us, each with its reason."""

import pytest

UPSTREAM_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        # Lightning 2.6 walks batches with names that torch 2.13 calls old.
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        # The trainers of these tests are small on purpose.
        "The '.*_dataloader' does not have many workers",
        "`max_epochs` was not set",
        "You are using a custom batch sampler",
        # Dynamo hides this warning of its own, but not where warnings are errors.
        "The .grad attribute of a Tensor that is not a leaf",
    )
]
