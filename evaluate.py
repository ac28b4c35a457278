"""Test a checkpoint: exact metrics over the test set, whatever the strategy.

python evaluate.py checkpoint=outputs/default/<run>/checkpoints/best.ckpt
python evaluate.py checkpoint=... strategy=ddp trainer.devices=2 data.batch_size=256
"""

from pathlib import Path

from harness import main  # if this fails: . .venv/bin/activate

if __name__ == "__main__":
    main("evaluate", conf=Path(__file__).with_name("conf"))
