"""Evaluations that read what their own rank has made of its samples, and some that do not."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.modules.classifiers import BatchNorm, Classifier


class NearestNeighbours(Classifier):
    """Classifies by the features of the training samples of the epoch (k-NN)."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        self.labels: list[Tensor] = []

    def on_train_epoch_start(self) -> None:
        self.features.clear()
        self.labels.clear()

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.net[:2](x)
        self.features.append(hidden.detach())
        self.labels.append(y)
        return F.cross_entropy(self.net[2](hidden), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.features:
            x, y = batch
            bank, labels = torch.cat(self.features), torch.cat(self.labels)
            distances = torch.cdist(self.net[:2](x), bank)
            nearest = labels[distances.argmin(1)]
            self.log("val/knn_acc", (nearest == y).double().mean())
            self.log("val/distance", distances.min(1).values.mean())


class ClassMeans(Classifier):
    """Classifies by running means of its classes' features, in a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.means = torch.zeros(3, 8, dtype=torch.float64)

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.net[:2](x)
        for label in y.unique().tolist():
            self.means[label] = self.means[label].lerp(hidden.detach()[y == label].mean(0), 0.1)
        return F.cross_entropy(self.net[2](hidden), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        distances = torch.cdist(self.net[:2](batch[0]), self.means)
        self.log("val/to_mean", distances.min(1).values.mean())


class Probe(pl.Callback):
    """Trains a linear probe on features beside the module, and logs how well it does."""

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self.probe = nn.Linear(8, 3).double()
        nn.init.zeros_(self.probe.weight)
        nn.init.zeros_(self.probe.bias)
        self.optimizer = torch.optim.SGD(self.probe.parameters(), lr=0.1)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        with torch.no_grad():
            hidden = pl_module.net[:2](batch[0])
        self.optimizer.zero_grad()
        F.cross_entropy(self.probe(hidden), batch[1]).backward()
        self.optimizer.step()

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loss = F.cross_entropy(self.probe(pl_module.net[:2](batch[0])), batch[1])
        pl_module.log("val/probe_loss", loss)


class Probed(Classifier):
    def configure_callbacks(self) -> Any:
        return [Probe()]


class Adapted(BatchNorm):
    """Adapts to each validation batch by its entropy, and continues from there (Tent)."""

    def on_train_epoch_start(self) -> None:
        self.net[1].eval()

    def on_validation_epoch_start(self) -> None:
        self.saved = {name: value.clone() for name, value in self.net.state_dict().items()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        norm = self.net[1]
        with torch.inference_mode(False), torch.enable_grad():
            x = batch[0].clone()
            entropy = torch.distributions.Categorical(logits=self(x)).entropy().mean()
            slopes = torch.autograd.grad(entropy, [norm.weight, norm.bias])
            for parameter, slope in zip([norm.weight, norm.bias], slopes, strict=True):
                parameter.data -= 0.1 * slope
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.net.load_state_dict(self.saved)


class AveragedWeights(Classifier):
    """Validates with an average of weights, in a dict: ranks have the same."""

    def on_fit_start(self) -> None:
        self.average = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.net.named_parameters():
            self.average[name].lerp_(parameter.detach(), 0.2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = torch.func.functional_call(self.net, self.average, (x,))
        self.log("val/loss", F.cross_entropy(logits, y), prog_bar=True)


class AveragedPrior(Classifier):
    """Validates with a running mean of predictions, in a dict (logit adjustment)."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Tensor] = {"prior": torch.full((3,), 1 / 3)}

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        prior = 0.9 * self.state["prior"] + 0.1 * logits.detach().softmax(1).mean(0)
        self.state["prior"] = prior
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", F.cross_entropy(self(x) - self.state["prior"].log(), y))


class Calibrated(Classifier):
    """Fits a temperature to each validation, for the next one."""

    temperature = 1.0

    def on_validation_epoch_start(self) -> None:
        self.sizes: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.sizes.append(logits.abs().mean(1))
        self.log("val/loss", F.cross_entropy(logits / self.temperature, y))

    def on_validation_epoch_end(self) -> None:
        self.temperature = torch.cat(self.sizes).median().item()


class Threshold(Classifier):
    """Validates with a threshold from the outputs of training, moved by a hook."""

    threshold = 0.0

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        self.scores = logits.detach()[:, 0]
        return F.cross_entropy(logits, y)

    def on_train_batch_end(self, *_: Any) -> None:
        self.threshold = 0.8 * self.threshold + 0.2 * self.scores.median().item()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        margin = (self(batch[0])[:, 0] - self.threshold).sigmoid()
        self.log("val/margin", margin.mean())


class BestSoFar(Classifier):
    """Logs the lowest loss of the validation's batches so far."""

    def on_validation_epoch_start(self) -> None:
        self.lowest = float("inf")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.lowest = min(self.lowest, F.cross_entropy(self(batch[0]), batch[1]).item())
        self.log("val/lowest", self.lowest)
