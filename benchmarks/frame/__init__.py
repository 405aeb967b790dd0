# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
What the studies share.

- options: a command's options, from the function that it calls
- runs: a `Job`, and many of them, in pieces that resume
- trainers: what all runs are told, and trainers that count
- curves: accuracy and what it cost, on the way
- kept: the CSV files of runs, and a `Study` whose runs are kept
- measures: what is read off a run
- predictions: what was predicted, and what became of it
- verdicts: intervals, Student's test and Holm's
- tables, pictures: on a terminal, on a page
- stand_in: a server in the place of vLLM's
"""
