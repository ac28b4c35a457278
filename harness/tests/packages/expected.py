"""The public modules, and the columns of their cells; the verdicts are in tests/verdicts.

The names are those of ``conf/experiment``. README.md says why cells are as they are.
"""

COLUMNS = {
    "train": "trains and, where the module has a test, tests",
    "ddp": "two processes end with the weights of one (within 1e-5)",
    "dp": "one process with two logical devices ends with the weights of one (within 1e-5)",
    "resume": "killed with SIGKILL inside of the second epoch, it goes on and ends equal by bit",
    "evaluate": "`evaluate.py` gives the numbers of the test after training",
    "predict": "`predict.py` writes predictions",
    "convert": "`scripts/convert_checkpoint.py` writes the network's weights, plain and equal",
    "weights_only": "`torch.load(weights_only=True)` reads `best.ckpt`",
}
# A backward pass reaches the parameters of one network only.
TWO_NETWORKS = {"ddp": ("++trainer.strategy.find_unused_parameters=true",)}
# Its author's on_save_checkpoint gives objects, which a run goes on with if it is told to.
TRUSTED = {"resume": ("checkpoint.trusted=true",)}
# What a column's command needs besides.
PACKAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "boring": {},
    "image_classifier": {},
    "gan": TWO_NETWORKS,
    "transformer": {},
    "ppo": TWO_NETWORKS,
    "chemprop": {},
    "nbeats": TRUSTED,
    "tft": TRUSTED,
    "deepar": {},
    "nequip": {},
    "rl4co": {"convert": ("--prefix", "")},  # a layer of it is called `module`
    "deeptab": {},
}
