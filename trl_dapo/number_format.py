# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Formatting of numbers, and wrapping of text."""

import textwrap


PAGE_WIDTH = 80  # characters per line


def format_duration(seconds: float) -> str:
    """Return a duration as `h:mm:ss`, or as days and hours from 100 hours on."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours < 100 else f"{hours // 24}d {hours % 24:02d}h"


def format_estimate(seconds: float) -> str:
    """Return an estimated duration in the largest unit of which there are at least two."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def format_number(value: float) -> str:
    return f"{value:z.3f}" if abs(value) < 100 else f"{value:.4g}"


def format_count(value: float, billion: str = "G") -> str:
    for unit in ("", "k", "M"):
        if value < 999.5:
            return f"{value:.1f}{unit}" if unit else f"{value:.0f}"
        value /= 1000
    return f"{value:.1f}{billion}"


def format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 20 else f"{num_bytes / 2**20:.1f} MiB"


def indented_lines(text: str, bullet: str = "") -> list[str]:
    """Return the lines of an indented paragraph, or of an item of a list."""
    first, rest = f"  {bullet}", " " * (2 + len(bullet))
    return textwrap.TextWrapper(PAGE_WIDTH, first, rest, break_long_words=False, break_on_hyphens=False).wrap(text)
