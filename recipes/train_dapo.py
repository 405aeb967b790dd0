# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Train with a recipe.

accelerate launch recipes/train_dapo.py --config recipes/smoke_cpu.yaml [--field value ...]
"""

import sys

from trl_dapo.cli import main


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
