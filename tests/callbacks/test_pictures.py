from types import SimpleNamespace

import torch

from harness import Picture
from project.callbacks.pictures import ConfusionMatrix, WorstMistakes

LABELS = torch.tensor([0, 0, 1, 2])
# Sample 1 is wrong with more confidence than sample 3; samples 0 and 2 are right.
LOGITS = torch.tensor([[5.0, 0, 0], [0, 9, 0], [0, 5, 0], [1, 0, 0]])
IMAGES = torch.arange(4.0).reshape(4, 1, 1, 1)


def kept(picture: Picture, images: torch.Tensor = IMAGES):
    """What a picture keeps of a test of two batches."""
    picture.reset()
    for part in (slice(0, 2), slice(2, 4)):
        outputs = {"inputs": images[part], "labels": LABELS[part], "logits": LOGITS[part]}
        picture.update(outputs, batch=None)
    return picture.kept()


def test_rows_of_the_confusion_matrix_are_true_classes() -> None:
    assert kept(ConfusionMatrix(3)).tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]


def test_confusion_matrix_shows_the_counts_of_all_processes() -> None:
    counts = kept(ConfusionMatrix(3))
    axes = ConfusionMatrix(3).draw([counts, counts]).axes[0]
    assert {text.get_position(): text.get_text() for text in axes.texts} == {
        (0, 0): "2",
        (1, 0): "2",
        (1, 1): "2",
        (0, 2): "2",
    }


def test_worst_mistakes_of_all_processes_are_drawn_without_the_right_answers() -> None:
    picture = WorstMistakes(num_images=3)
    figure = picture.draw([kept(picture), {}])  # another process had no sample
    assert [axes.get_title() for axes in figure.axes] == ["0, taken for 1", "2, taken for 0"]


def test_inputs_that_are_no_images_draw_nothing() -> None:
    picture = WorstMistakes()
    assert picture.draw([kept(picture, torch.zeros(4, 10))]) is None


def test_images_are_shown_as_before_the_data_module_normalised_them() -> None:
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
    images = torch.rand(4, 3, 2, 2)
    shape = (3, 1, 1)
    normalised = (images - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
    names = ["ant", "bee", "cow"]
    data = SimpleNamespace(mean=mean, std=std, facts={"class_names": names})
    picture = WorstMistakes()
    picture.on_test_start(SimpleNamespace(datamodule=data), None)
    figure = picture.draw([kept(picture, normalised)])
    assert [axes.get_title() for axes in figure.axes] == [
        "ant, taken for bee",
        "cow, taken for ant",
    ]
    shown = torch.tensor(figure.axes[0].images[0].get_array())
    assert torch.allclose(shown, images[1].movedim(0, -1), atol=1e-6)
