"""Losses that compare samples with each other, as researchers write them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.modules.classifiers import OneLoss, layers


class Contrastive(OneLoss):
    """Each view must find the other one of its own sample (InfoNCE)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers(num_outputs=4)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=1)

    def compare(self, queries: Tensor, keys: Tensor) -> Tensor:
        right = torch.arange(len(queries), device=queries.device)
        return F.cross_entropy(queries @ keys.T / 0.5, right)

    def loss(self, batch: Any) -> Tensor:
        return self.compare(self(batch[0]), self(batch[1]))


class GatheredNegatives(Contrastive):
    """Compares with the views of all processes, as SimCLR for several GPUs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        views = (self.all_gather(self(x), sync_grads=True).flatten(0, -2) for x in batch[:2])
        return self.compare(*views)


class Teacher(Contrastive):
    """A student learns to agree with the average of its own past, in a slower network."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = layers(num_outputs=4)
        self.slow.load_state_dict(self.net.state_dict())
        self.slow.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = F.normalize(self.slow(batch[1]), dim=1)
        return (2 - 2 * F.cosine_similarity(self(batch[0]), target)).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


class Queue(Teacher):
    """MoCo: keys of the slower network wait in a queue, which forward writes, or the step."""

    def __init__(self, in_step: bool = False) -> None:
        super().__init__()
        self.in_step = in_step
        self.register_buffer("queue", F.normalize(torch.randn(16, 4), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, query: Tensor, key: Tensor) -> Any:
        with torch.no_grad():
            keys = F.normalize(self.slow(key), dim=1)
        if self.training and not self.in_step:
            self.enqueue(keys)
        return F.normalize(self.net(query), dim=1), keys

    def enqueue(self, keys: Tensor) -> None:
        rows = (self.place + torch.arange(len(keys), device=keys.device)) % len(self.queue)
        self.queue[rows] = keys
        self.place = (self.place + len(keys)) % len(self.queue)

    def loss(self, batch: Any) -> Tensor:
        past = self.queue.clone()
        queries, keys = self(batch[0], batch[1])
        if self.training and self.in_step:
            self.enqueue(self.all_gather(keys).flatten(0, -2))
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ past.T], 1)
        return F.cross_entropy(logits / 0.5, torch.zeros_like(logits[:, 0], dtype=torch.long))
