"""Write scikit-learn's 1,797 digits as class folders of PNG files: images to try things on.

python -m harness.images.examples digits
python train.py experiment=images data.root=digits data.size=32 data.flip=false
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def write_digits(root: Path, num: int | None = None) -> None:
    """Write ``root/<digit>/<number>.png``, of 8x8 pixels.

    Args:
        root: a folder, made if it does not exist.
        num: how many; all by default.
    """
    digits = load_digits()
    images = np.round(digits.images[:num] * (255 / 16)).astype(np.uint8)
    for i, (image, digit) in enumerate(zip(images, digits.target, strict=False)):
        path = root / str(digit) / f"{i:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the class folders go")
    write_digits(parser.parse_args().folder)
