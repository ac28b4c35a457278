"""PPO in the way of Lightning's example, which no package holds.

The module brings a loader over an iterable data set that plays in a gymnasium environment with the
module's own, changing weights; what was played lives in Python lists, outside of the checkpoint.
"""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset


def mlp(num_inputs: int, num_outputs: int, hidden: int = 32) -> nn.Sequential:
    """A small network."""
    return nn.Sequential(nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, num_outputs))


class Experiences(IterableDataset[Any]):
    """Whatever a function yields."""

    def __init__(self, generate: Callable[[], Iterator[Any]]) -> None:
        self.generate = generate

    def __iter__(self) -> Iterator[Any]:
        return self.generate()


class PPO(LightningModule):
    """Clipped policy gradients under manual optimisation, with an optimizer per network."""

    def __init__(
        self,
        env: str = "CartPole-v1",
        gamma: float = 0.99,
        lam: float = 0.95,
        lr_actor: float = 3e-4,
        lr_critic: float = 1e-3,
        batch_size: int = 16,
        steps_per_epoch: int = 64,
        clip_ratio: float = 0.2,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.env = gymnasium.make(env)
        num_inputs = self.env.observation_space.shape[0]
        self.critic = mlp(num_inputs, 1)
        self.actor = mlp(num_inputs, int(self.env.action_space.n))
        self.state = torch.tensor(self.env.reset()[0])
        self.episode_rewards: list[float] = []

    def forward(self, x: Tensor) -> tuple[Categorical, Tensor, Tensor]:
        """The policy, an action drawn from it, and the state's value."""
        policy = Categorical(logits=self.actor(x))
        return policy, policy.sample(), self.critic(x)

    def play(self) -> Iterator[tuple[Any, ...]]:
        """Play for an epoch, then yield each step with its return and its advantage."""
        steps, returns, advantages = [], [], []
        rewards: list[float] = []
        values: list[float] = []
        for step in range(self.hparams.steps_per_epoch):
            with torch.no_grad():
                policy, action, value = self(self.state.to(self.device))
            following, reward, is_terminal, is_cut, _ = self.env.step(action.cpu().numpy())
            steps.append((self.state, action, policy.log_prob(action)))
            rewards.append(float(reward))
            values.append(value.item())
            self.state = torch.tensor(following)
            is_last = step == self.hparams.steps_per_epoch - 1
            if is_terminal or is_cut or is_last:
                with torch.no_grad():
                    last = 0.0 if is_terminal else self(self.state.to(self.device))[2].item()
                returns += self._discounted([*rewards, last], self.hparams.gamma)[:-1]
                deltas = [
                    r + self.hparams.gamma * following_value - v
                    for r, v, following_value in zip(
                        rewards, values, [*values[1:], last], strict=True
                    )
                ]
                advantages += self._discounted(deltas, self.hparams.gamma * self.hparams.lam)
                self.episode_rewards.append(sum(rewards))
                rewards, values = [], []
                self.state = torch.tensor(self.env.reset()[0])
        for one, value, advantage in zip(steps, returns, advantages, strict=True):
            yield *one, value, advantage

    @staticmethod
    def _discounted(rewards: list[float], factor: float) -> list[float]:
        total, found = 0.0, []
        for reward in reversed(rewards):
            total = reward + factor * total
            found.append(total)
        return found[::-1]

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        """One step of the actor and one of the critic."""
        state, action, old_log_prob, value, advantage = batch
        advantage = ((advantage - advantage.mean()) / advantage.std()).float()
        of_actor, of_critic = self.optimizers()
        ratio = torch.exp(Categorical(logits=self.actor(state)).log_prob(action) - old_log_prob)
        clip = self.hparams.clip_ratio
        clipped = torch.clamp(ratio, 1 - clip, 1 + clip) * advantage
        loss_actor = -torch.min(ratio * advantage, clipped).mean()
        of_actor.zero_grad()
        self.manual_backward(loss_actor)
        of_actor.step()
        loss_critic = (value.float() - self.critic(state).squeeze(-1)).square().mean()
        of_critic.zero_grad()
        self.manual_backward(loss_critic)
        of_critic.step()
        self.log("avg_ep_reward", sum(self.episode_rewards) / len(self.episode_rewards))
        self.log_dict({"loss_actor": loss_actor, "loss_critic": loss_critic}, on_epoch=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One for each network."""
        return [
            torch.optim.Adam(self.actor.parameters(), lr=self.hparams.lr_actor),
            torch.optim.Adam(self.critic.parameters(), lr=self.hparams.lr_critic),
        ]

    def train_dataloader(self) -> DataLoader[Any]:
        """What is played with the weights of the moment."""
        return DataLoader(Experiences(self.play), batch_size=self.hparams.batch_size)
