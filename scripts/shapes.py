"""Draw pictures of shapes into class folders, to try experiment=images.

python scripts/shapes.py shapes
python train.py experiment=images data.root=shapes data.size=32
"""

import argparse
import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CORNERS = {"circle": 60, "pentagon": 5, "square": 4, "star": 10, "triangle": 3}


def write_shapes(root: Path, num: int = 200) -> None:
    """Write ``root/<shape>/<number>.jpg``, of 40 to 80 pixels, in random colours and angles.

    Args:
        root: a folder, made if it does not exist.
        num: pictures of each of the five shapes.
    """
    rng = np.random.default_rng(0)
    for name, num_corners in CORNERS.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(num):
            width, height = rng.integers(40, 81, 2).tolist()
            noise = rng.integers(0, 100, (height, width, 3)) + rng.integers(0, 60, 3)
            image = Image.fromarray(noise.astype(np.uint8))
            short = min(width, height)  # data=images crops the central square
            radius = short * rng.uniform(0.25, 0.4)
            x, y = (
                (side - short) / 2 + rng.uniform(radius, short - radius) for side in (width, height)
            )
            turn = rng.uniform(0, math.tau)
            points = []
            for k in range(num_corners):
                angle = turn + math.tau * k / num_corners
                r = radius * (0.4 if name == "star" and k % 2 else 1)
                points.append((x + r * math.cos(angle), y + r * math.sin(angle)))
            color = tuple(rng.integers(120, 256, 3).tolist())
            ImageDraw.Draw(image).polygon(points, fill=color)
            image.save(root / name / f"{i:03d}.jpg", quality=90)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the class folders go")
    write_shapes(parser.parse_args().folder)
