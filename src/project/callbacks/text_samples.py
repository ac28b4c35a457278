"""Texts that a language model writes during training."""

import logging
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger

from project.models.language_model import continue_texts

log = logging.getLogger(__name__)


class TextSamples(pl.Callback):
    """Generate a text after each validation, and write it to a file and to TensorBoard.

    The tokens are drawn from a separate random generator, so that training does not change and the
    same run writes the same texts. After an error, the run logs a warning and writes no more texts.

    Args:
        folder: the folder of the files, one for each validation.
        prompt: the beginning of the text.
        num_tokens: the number of tokens to generate.
        temperature: 0 selects the most likely token; 1 samples from the network's distribution.
        seed: seed of the random generator.
    """

    def __init__(
        self,
        folder: str | Path,
        prompt: str = "",
        num_tokens: int = 200,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> None:
        self.folder, self.prompt, self.num_tokens = Path(folder), prompt, num_tokens
        self.temperature, self.seed = temperature, seed
        self.has_failed = False

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Generate a text on all ranks, and write it on rank 0."""
        if trainer.sanity_checking or self.has_failed:
            return
        try:
            text = self.text(trainer, pl_module)  # on all ranks: under fsdp each has a shard
            if trainer.is_global_zero:
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / f"step_{trainer.global_step:07d}.txt"
                path.write_text(text, encoding="utf-8")
                for logger in trainer.loggers:
                    if isinstance(logger, TensorBoardLogger):
                        indented = "    " + text.replace("\n", "\n    ")  # a code block in Markdown
                        logger.experiment.add_text("samples", indented, trainer.global_step)
        except Exception as error:
            self.has_failed = True
            name = type(error).__name__
            log.warning("TextSamples has failed and writes no more texts: %s: %s", name, error)

    def text(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
        """Return the prompt and the generated text."""
        data = trainer.datamodule  # type: ignore[attr-defined]  # set untyped
        # A fixed shape, so that torch compiles once. Padding after the text changes nothing.
        ids = data.prompt(self.prompt)[-data.facts["length"] :]
        window = torch.full((1, data.facts["length"]), data.facts["pad_id"])
        window[0, : len(ids)] = torch.tensor(ids)
        lengths = torch.tensor([len(ids)], device=pl_module.device)
        generator = torch.Generator().manual_seed(self.seed)
        options = self.num_tokens, self.temperature, generator
        ids = continue_texts(pl_module, window.to(pl_module.device), lengths, *options)
        return str(self.prompt + data.tokenizer.decode(ids[0].tolist()))
