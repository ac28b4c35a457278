from types import SimpleNamespace

import pytest
import torch

from project.callbacks import confusion_matrix, worst_mistakes

LABELS = torch.tensor([0, 0, 1, 2])
# Sample 1 is wrong with more confidence than sample 3; samples 0 and 2 are right.
LOGITS = torch.tensor([[5.0, 0, 0], [0, 9, 0], [0, 5, 0], [1, 0, 0]])
OUTPUTS = {"inputs": torch.arange(4.0).reshape(4, 1, 1, 1), "labels": LABELS, "logits": LOGITS}
TRAINER = SimpleNamespace(testing=True, test_dataloaders=None, world_size=1)
MODULE = SimpleNamespace(device="cpu")


def run(callback, monkeypatch: pytest.MonkeyPatch):
    """Return what a callback would draw after a test of two batches."""
    drawn = []
    module = confusion_matrix if "confusion" in type(callback).__module__ else worst_mistakes
    monkeypatch.setattr(module, "draw", lambda _, what: drawn.append(what))
    callback.on_test_start(TRAINER, MODULE)
    for part in (slice(0, 2), slice(2, 4)):
        batch = {name: value[part] for name, value in OUTPUTS.items()}
        callback.on_test_batch_end(TRAINER, MODULE, batch, None, 0)
    callback.on_test_epoch_end(TRAINER, MODULE)
    return drawn[0]


def test_rows_of_the_confusion_matrix_are_true_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = run(confusion_matrix.ConfusionMatrix(3), monkeypatch)
    assert counts.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]


def test_worst_mistakes_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    worst = run(worst_mistakes.WorstMistakes(num_images=3), monkeypatch)
    assert worst["images"].flatten().tolist()[:2] == [1, 3]
    assert worst["predictions"].tolist()[:2] == [1, 0]
    assert worst["losses"][2] == -1  # a right answer fills the place, and is not drawn
