"""Lightning's searches for a batch size and a learning rate, in one process of an experiment.

The results hold for several, because training is the same under every strategy.
"""

from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from pytorch_lightning.tuner.tuning import Tuner

from harness.errors import UserError
from harness.tuning.trial import num_processes, one_process

LARGEST = 8192  # Lightning's search ends here
SMALLEST = 2


@dataclass
class BatchSize:
    """The largest batch, in powers of two, that one process could train with.

    Args:
        per_process: samples in that batch.
        num_processes: processes of the experiment.
        num_samples: training samples in the data set.
        is_out_of_memory: whether twice as many samples did not fit; otherwise the search has
            ended for another reason than memory.
    """

    per_process: int
    num_processes: int
    num_samples: int
    is_out_of_memory: bool

    @property
    def of_all_processes(self) -> int:
        """The value of ``data.batch_size``, which counts the samples of all processes."""
        return min(self.per_process * self.num_processes, self.num_samples)


def find_batch_size(cfg: Any) -> BatchSize:
    """Double the batch until memory, the data set, or the search's range is exhausted.

    Raises:
        UserError: where not even two samples fit.
    """
    processes = num_processes(cfg.trainer)
    cfg.data.max_samples_per_device = None  # it would split the batches that are tried
    cfg.data.drop_last, cfg.trainer.accumulate_grad_batches = False, 1
    with one_process(cfg) as (trainer, model, data):
        num_samples = len(data.dataset("train"))
        largest = min(LARGEST, num_samples)
        data.batch_size = SMALLEST
        # The search ends by loading the state it has saved, which has another batch size.
        data.load_state_dict = lambda _: None
        found = Tuner(trainer).scale_batch_size(
            model, datamodule=data, init_val=SMALLEST, max_val=largest + 1
        )
    if not found or found < SMALLEST:
        raise UserError("Not even a batch of two samples fits in memory: use a smaller model.")
    if found > largest:  # Lightning has doubled once more without trying
        found //= 2
    return BatchSize(found, processes, num_samples, is_out_of_memory=2 * found <= largest)


def find_learning_rate(
    cfg: Any, lowest: float, highest: float, num_steps: int
) -> tuple[float, Figure]:
    """Train some steps with a rate that grows from ``lowest`` to ``highest``.

    Returns:
        The rate at which the loss falls the fastest, and the curve of the losses.

    Raises:
        UserError: where the losses show no fall.
    """
    cfg.trainer.max_steps = -1
    with one_process(cfg) as (trainer, model, data):
        steps_per_epoch = max(1, len(data.dataset("train")) // cfg.data.batch_size)
        epochs = num_steps // steps_per_epoch + 2
        trainer.fit_loop.max_epochs = max(epochs, cfg.trainer.max_epochs or 0)
        finder: Any = Tuner(trainer).lr_find(
            model,
            datamodule=data,
            min_lr=lowest,
            max_lr=highest,
            num_training=num_steps,
            update_attr=False,
        )
    suggestion = finder.suggestion()
    if suggestion is None:
        raise UserError(f"{len(finder.results['lr'])} steps are too few: use a larger --steps.")
    picture = Figure(figsize=(6, 4), layout="constrained")
    finder.plot(suggest=True, ax=picture.add_subplot(title="Loss at growing learning rates"))
    return suggestion, picture
