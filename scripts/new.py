"""Write a first network, module, data set or experiment: `python -m harness.new` by another name.

python scripts/new.py model NAME
python scripts/new.py --help
"""

from harness.new.__main__ import main  # if this fails: . .venv/bin/activate

if __name__ == "__main__":
    main()
