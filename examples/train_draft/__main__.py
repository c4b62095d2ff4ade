"""Train an EAGLE-3 or a DFlash head for a model, from the model's own answers.

python -m examples.train_draft generate [MODEL] --work FOLDER     write answers to train and to evaluate with
python -m examples.train_draft train [MODEL] --work FOLDER        train; run again to continue
python -m examples.train_draft measure [MODEL] --draft FOLDER     acceptance and speed in the engine
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from train_draft.commands import main

    sys.exit(main())
