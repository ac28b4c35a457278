from pathlib import Path

import pytest
import torch

from harness import evaluate, load_run, predict, train
from project.models.language_model import continue_texts, token_losses
from project.models.transformer import Transformer

SMALL = ("model.net.width=16", "model.net.num_layers=1", "model.net.num_heads=2")
BRIEF = ("strategy=cpu", "trainer.max_epochs=1", "trainer.limit_train_batches=2")
BRIEF += ("trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "data.length=32")


def network() -> Transformer:
    torch.manual_seed(0)
    return Transformer(11, 12, width=16, num_layers=2, num_heads=2).eval()


def test_token_looks_back_alone() -> None:
    net, tokens = network(), torch.randint(10, (2, 12))
    other = tokens.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 10
    one, two = net(tokens), net(other)
    torch.testing.assert_close(one[:, :7], two[:, :7])
    assert not torch.allclose(one[:, 7:], two[:, 7:])


def test_positions_count() -> None:
    logits = network()(torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]]))
    assert not torch.allclose(logits[0, -1], logits[1, -1])


def test_padding_counts_nowhere() -> None:
    logits, labels = torch.randn(2, 4, 11), torch.tensor([[1, 2, -100, -100], [3, 4, 5, 6]])
    losses = token_losses(logits, labels)
    assert losses[0, 2:].tolist() == [0, 0]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)
    torch.testing.assert_close(losses.sum() / 6, expected)


class Successor(torch.nn.Module):
    """Knows that 3 follows 2, of ten numbers."""

    def forward(self, tokens):
        return 50 * torch.nn.functional.one_hot((tokens + 1) % 10, 10).float()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_go_on_also_beyond_the_window(temperature: float) -> None:
    tokens = torch.tensor([[4, 5, 0, 0], [7, 0, 0, 0], [1, 2, 3, 4]])
    found = continue_texts(Successor(), tokens, torch.tensor([2, 1, 4]), 5, temperature)
    assert found.tolist() == [[6, 7, 8, 9, 0], [8, 9, 0, 1, 2], [5, 6, 7, 8, 9]]
    assert tokens.tolist()[0] == [4, 5, 0, 0]


def test_run_writes_samples_and_scores_and_continues_lines(tmp_path: Path) -> None:
    words = ("experiment=text", *BRIEF, *SMALL, f"output_dir={tmp_path}")
    run = train(*words, "trainer.max_epochs=2", "data.unit=lines")
    assert {"test/loss", "test/perplexity", "test/bits_per_byte"} <= run.results.keys()
    again = evaluate(run.checkpoint, "trainer.limit_test_batches=1")
    assert again.results["test/loss"] == run.results["test/loss"]
    assert len(list((run.folder / "samples").iterdir())) == 2
    prompts, output = tmp_path / "prompts.txt", tmp_path / "table.csv"
    prompts.write_text("the cat\n\nsome dogs see\n")
    settings = (f"data.predict_file={prompts}", "model.num_continued=5", f"output={output}")
    predict(run.checkpoint, *settings)
    header, *rows = output.read_text().splitlines()
    assert header == "sample,tokens,loss,perplexity,continuation"
    assert [row.split(",")[1] for row in rows if row[:2] in ("0,", "1,", "2,")] == ["8", "1", "14"]
    assert load_run(run.folder).model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 257)


def test_samples_take_nothing_from_training_and_cost_no_run(tmp_path: Path) -> None:
    words = ("experiment=text", *BRIEF, *SMALL, "model.net.dropout=0.1")
    choices = ("seed=1", "callbacks.text_samples=null", "callbacks.text_samples.num_tokens=-1")
    runs = [train(*words, choice, f"output_dir={tmp_path}") for choice in choices]
    assert len({run.results["test/loss"] for run in runs}) == 1
    assert "writes no more texts" in (runs[2].folder / "run.log").read_text()
