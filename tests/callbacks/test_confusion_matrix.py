import torch

from project.callbacks.confusion_matrix import ConfusionMatrix

LABELS = torch.tensor([0, 0, 1, 2])
LOGITS = torch.tensor([[5.0, 0, 0], [0, 9, 0], [0, 5, 0], [1, 0, 0]])


def test_confusion_matrix_shows_the_counts_of_all_batches_and_processes() -> None:
    picture = ConfusionMatrix(3)
    picture.reset()
    for part in (slice(0, 2), slice(2, 4)):
        picture.update({"labels": LABELS[part], "logits": LOGITS[part]}, batch=None)
    counts = picture.kept()
    assert counts.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]  # rows are true classes
    axes = picture.draw([counts, counts]).axes[0]
    shown = {text.get_position(): text.get_text() for text in axes.texts}
    assert shown == dict.fromkeys([(0, 0), (1, 0), (1, 1), (0, 2)], "2")
