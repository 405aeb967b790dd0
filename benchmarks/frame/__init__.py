# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Code that the studies share.

- options: the options of a command, read from the function that it calls
- runs: a `Job`, and many of them, so that an interrupted call resumes
- trainers: settings of all runs, and trainers that count tokens
- curves: accuracy and its cost during a run
- kept: the CSV files of runs, and a `Study` whose runs are kept
- measures: figures that are read off a run
- predictions: predictions and their outcomes
- verdicts: intervals, Student's test and Holm's procedure
- tables, pictures: for a terminal and for a page
- stand_in: a stand-in for vLLM's server
"""
