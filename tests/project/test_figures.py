# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Every figure in README.md and docs/ that looks measured was written by a benchmark; figures.txt says by which."""

import re
from pathlib import Path

import pytest


pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}

NUMBER = re.compile(r"(?<![\w.,])[-+]?\d[\d,]*(?:\.\d+)?(?:e-\d+)?(?![\d.]*\d)")
# Figures that look measured: with decimals, in thousands, or of something that is counted.
FIGURE = re.compile(
    r"(?<![\w.,/])(?:\d[\d,]*\.\d+(?:e-\d+)?(?![\d.]*\.\d)|\d{1,3}(?:,\d{3})+"
    r"|\d+(?=x\b|%| (?:%|ms|[KMG]iB|bytes|points)(?!\w)))"
)
GENERATED = {"configuration"}  # by docs/configuration.py


def plain(text):
    """Return a text in one line with single spaces, in which parts are searched."""
    return " ".join(text.split())


def prose(name):
    """Return the text of a page without code, targets of links, and tables that are written by a command."""
    text = re.sub(r"^```.*?^```", "", PAGES[name], flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- ([\w ]+): python .*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("    ")]
    return plain(re.sub(r"\]\([^)]*\)", "]", "\n".join(lines)))


def values(text):
    return [match.replace(",", "").removesuffix(".") for match in NUMBER.findall(text.replace("x", " x "))]


def holds(figure, measured):
    """
    Return whether a figure is one of those measured, rounded as the figure is. A share may be written in percent.
    """
    if "e-" in figure:
        return figure in measured
    signed, decimals = figure[0] in "+-", len(figure.partition(".")[2])
    found = [float(value) if signed else abs(float(value)) for value in measured]
    found += [100 * value for value in found]
    return any(f"{value:{'+' if signed else ''}.{decimals}f}" == figure for value in found)


def read_places():
    """
    Return each entry of figures.txt: a page, its numbers, and the lines below, which say where they were measured or
    why nowhere.
    """
    entries = []
    for line in (Path(__file__).parent / "figures.txt").read_text().partition("\n\n")[2].splitlines():
        if line.startswith("    "):
            entries[-1][2].append(line.strip())
        elif line:
            page, numbers = line.split(": ", 1)
            entries.append((page, tuple(numbers.split()), []))
    return entries


PLACES = read_places()
MEASURED = [entry for entry in PLACES if re.match(r"\S+\.(md|csv): ", entry[2][0])]


@pytest.mark.parametrize(("page", "numbers", "places"), MEASURED, ids=lambda value: str(value)[:40])
def test_a_figure_of_a_page_is_the_one_that_was_measured(page, numbers, places):
    measured = []
    for file, part in (place.split(": ", 1) for place in places):
        assert part in plain((ROOT / "benchmarks" / file).read_text())
        measured += values(part.replace(",", " ") if file.endswith(".csv") else part)
    assert [number for number in numbers if not holds(number, measured)] == []


@pytest.mark.parametrize("name", sorted(PAGES.keys() - GENERATED))
def test_every_figure_of_a_page_has_an_entry_in_figures_txt(name):
    text = re.sub(r"`[^`]*`", "", prose(name))
    known = {number.lstrip("+-") for page, numbers, _ in PLACES if page == name for number in numbers}
    found = {
        match[0].replace(",", ""): text[max(match.start() - 40, 0) : match.end() + 20]
        for match in FIGURE.finditer(text)
    }
    assert {figure: where for figure, where in found.items() if figure not in known} == {}


@pytest.mark.parametrize("name", sorted(PAGES.keys() - GENERATED))
def test_figures_txt_has_no_figure_that_its_page_no_longer_has(name):
    on_page = {number.lstrip("+-") for number in values(plain(PAGES[name]))}
    known = {number.lstrip("+-") for page, numbers, _ in PLACES if page == name for number in numbers}
    assert known - on_page == set()
