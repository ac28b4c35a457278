"""Train a model, then test its best checkpoint.

python train.py                                     train on one GPU if there is one, else the CPU
python train.py experiment=synthetic                use a file of settings in conf/experiment/
python train.py strategy=ddp trainer.devices=2      two processes
python train.py model.optimizer.lr=0.01             any key of any YAML file
python train.py -m seed=1,2,3                       a sweep, see harness/docs/sweeps.md
python train.py --help                              groups and keys
"""

from pathlib import Path

from harness import main  # if this fails: . .venv/bin/activate

if __name__ == "__main__":
    main("train", conf=Path(__file__).with_name("conf"))
