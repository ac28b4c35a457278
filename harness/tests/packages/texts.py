"""A fine-tuning of transformers' networks without its Trainer, as its pages and peft's show it.

The network is built from a config, so nothing is downloaded; with ``lora`` only peft's adapters and
the classifier are trained.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertConfig


class TextClassifier(LightningModule):
    """The network gives its own loss, as it does where a batch holds labels.

    Args:
        network: arguments of its config.
        lora: arguments of ``LoraConfig``; none trains the whole network.
    """

    def __init__(
        self, network: dict[str, Any], lora: dict[str, Any] | None = None, lr: float = 1e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForSequenceClassification.from_config(BertConfig(**network))
        if lora is not None:
            self.model = get_peft_model(self.model, LoraConfig(task_type="SEQ_CLS", **lora))

    def forward(self, **inputs: Tensor) -> Any:
        """Return the network's output: a loss and logits."""
        return self.model(**inputs)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Log and return the loss."""
        loss = self(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss and the accuracy."""
        self._log_of("val", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss and the accuracy."""
        self._log_of("test", batch)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Logits of shape (B, classes)."""
        return self(**batch).logits

    def _log_of(self, stage: str, batch: dict[str, Tensor]) -> None:
        found = self(**batch)
        right = (found.logits.argmax(dim=1) == batch["labels"]).float().mean()
        self.log_dict({f"{stage}_loss": found.loss, f"{stage}_acc": right})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Optimize what is trained."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams.lr)
