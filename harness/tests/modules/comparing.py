"""Losses that compare samples with each other, as researchers write them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.modules.one_loss import OneLoss


def info_nce(queries: Tensor, keys: Tensor, temperature: float = 0.5) -> Tensor:
    """Each query must find its own key."""
    logits = queries @ keys.T / temperature
    return F.cross_entropy(logits, torch.arange(len(queries), device=queries.device))


class Contrastive(OneLoss):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=1)

    def loss(self, batch: Any) -> Tensor:
        return info_nce(self(batch[0]), self(batch[1]))


class GatheredNegatives(Contrastive):
    """Compares with the views of all processes, as SimCLR for several GPUs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        queries, keys = (
            self.all_gather(self(x), sync_grads=True).flatten(0, -2) for x in batch[:2]
        )
        return info_nce(queries, keys)


class Queue(Contrastive):
    """MoCo: keys of a slower network wait in a queue, which forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.slow.load_state_dict(self.net.state_dict())
        self.slow.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(16, 4), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        queries = F.normalize(self.net(query), dim=1)
        with torch.no_grad():
            keys = F.normalize(self.slow(key), dim=1)
        right = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([right, queries @ self.queue.clone().T], 1)
        if self.training:
            self.enqueue(keys)
        return logits

    def enqueue(self, keys: Tensor) -> None:
        rows = (self.place + torch.arange(len(keys), device=keys.device)) % len(self.queue)
        self.queue[rows] = keys
        self.place = (self.place + len(keys)) % len(self.queue)

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch[0], batch[1])
        return F.cross_entropy(logits / 0.5, torch.zeros_like(logits[:, 0], dtype=torch.long))

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


class QueueInStep(Queue):
    """The same queue, written by the step with the keys of all processes."""

    def forward(self, query: Tensor, key: Tensor) -> Any:
        with torch.no_grad():
            keys = F.normalize(self.slow(key), dim=1)
        return F.normalize(self.net(query), dim=1), keys

    def past(self) -> Tensor:
        return self.queue.clone()

    def loss(self, batch: Any) -> Tensor:
        queries, keys = self(batch[0], batch[1])
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.past().T], 1)
        if self.training:
            self.enqueue(self.all_gather(keys).flatten(0, -2))
        return F.cross_entropy(logits / 0.5, torch.zeros_like(logits[:, 0], dtype=torch.long))


class ForgottenClone(QueueInStep):
    """Changes in place what backward needs: no strategy trains it."""

    def past(self) -> Tensor:
        return self.queue


class Teacher(Contrastive):
    """A student learns to agree with the average of its own past."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.teacher.load_state_dict(self.net.state_dict())
        self.teacher.requires_grad_(False)
        self.head = nn.Linear(4, 4)

    def loss(self, batch: Any) -> Tensor:
        student = self.head(self(batch[0]))
        with torch.no_grad():
            target = F.normalize(self.teacher(batch[1]), dim=1)
        return (2 - 2 * F.cosine_similarity(student, target)).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
