# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m trl_dapo.cli`, as `accelerate launch --module` starts it."""

import sys

from .entry_point import main


sys.exit(main())
