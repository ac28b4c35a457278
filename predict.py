"""Predict with a checkpoint and write a CSV with one row per sample.

python predict.py checkpoint=outputs/default/<run>/checkpoints/best.ckpt
python predict.py checkpoint=... output=predictions.csv
python predict.py checkpoint=... data.predict_file=rows.csv
"""

from pathlib import Path

from harness import main  # if this fails: . .venv/bin/activate

if __name__ == "__main__":
    main("predict", conf=Path(__file__).with_name("conf"))
