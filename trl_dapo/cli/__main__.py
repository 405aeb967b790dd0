# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The entry point of `python -m trl_dapo.cli`, which `accelerate launch --module` uses."""

import sys

from .entry_point import main


sys.exit(main())
