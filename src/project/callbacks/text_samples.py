"""Texts that a language model writes in the course of its training."""

import logging
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger

from project.models.language_model import continue_texts

log = logging.getLogger(__name__)


class TextSamples(pl.Callback):
    """Let a language model write after each validation, into a file and into TensorBoard.

    It draws from a generator of its own, so that training takes no notice and the same run writes
    the same. Its errors are logged once, and cost the run nothing.

    Args:
        folder: of the texts, a file for each step.
        prompt: what the text begins with.
        num_tokens: how many it writes.
        temperature: 0 takes the likeliest token; 1 draws as the network says.
        seed: of its generator.
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
        """Write a text."""
        if trainer.sanity_checking or self.has_failed:
            return
        try:
            text = self.text(trainer, pl_module)  # by all processes: each may have a part of it
            if trainer.is_global_zero:
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / f"step_{trainer.global_step:07d}.txt"
                path.write_text(text, encoding="utf-8")
                for logger in trainer.loggers:
                    if isinstance(logger, TensorBoardLogger):
                        indented = "    " + text.replace("\n", "\n    ")  # as code, in Markdown
                        logger.experiment.add_text("samples", indented, trainer.global_step)
        except Exception as error:
            self.has_failed = True
            log.warning("No more text samples: %s: %s", type(error).__name__, error)

    def text(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
        """Return the prompt, and what the network writes."""
        data = trainer.datamodule  # type: ignore[attr-defined]  # set untyped
        # A window of one shape is compiled once. What is behind the text is not looked at.
        ids = data.prompt(self.prompt)[-data.facts["length"] :]
        window = torch.full((1, data.facts["length"]), data.facts["pad_id"])
        window[0, : len(ids)] = torch.tensor(ids)
        lengths = torch.tensor([len(ids)], device=pl_module.device)
        generator = torch.Generator().manual_seed(self.seed)
        how = self.num_tokens, self.temperature, generator
        ids = continue_texts(pl_module, window.to(pl_module.device), lengths, *how)
        return str(self.prompt + data.tokenizer.decode(ids[0].tolist()))
