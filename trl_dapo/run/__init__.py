# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run leaves on the disk and says on the terminal, what it is checked for at its start, and when it ends."""
