# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Pages, docstrings, comments and messages are in plain English."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest


ROOT = Path(__file__).parents[2]
SUFFIXES = (".py", ".md", ".yaml", ".toml", ".ipynb")
FOLDERS = ("trl_dapo", "recipes", "docs", "notebooks", "benchmarks", "tests")

# What is looked for, and what to write instead. ^ is the beginning of a text, a paragraph or a sentence.
CALQUES = {
    r"(?<!there )\b(?:is|are|was|were) no (?!longer|more|less|better|worse|later|earlier|other)": "is not a",
    r"\bbeside\b": "compared with, or next to",
    r"\b(?:tokens|seconds|prompts|completions|groups|rollouts|bytes|MB|GiB|calls|times|updates|lines) an? "
    r"(?:step|rollout|round|prompt|group|token|second|pass|completion|update|process|run|line)\b": "per",
    r"^(?-i:Where) (?!does|do|did|is|are|can|to\b|should)": "if, or when",
    r"\bin (?:place of|its place|their place|his place)\b": "instead of",
    r"(?<!far )\bas (?:it|they) (?:is|are|stands?)\b(?! written)": "unchanged",
    r"\b(?:left|leaves?|leaving|let) (?:\w+ )?alone\b": "unchanged, or not touched",
    r"^(?-i:Of) (?!course)": "If there are several ..., or the subject first",
    r"\bhangs? on\b": "depends on",
    r"\b(?:goes|go|went|going) on\b": "continues",
    r"\b(?:stands?|stood) (?:in|on|at|there|above|below)\b": "is in",
    r"\b(?:is|are|was|were|be|if|tells?|says?|how|what|who|that's) (?:right|wrong)\b|\b(?:right|wrong|truly right) "
    r"(?:answers?|completions?|groups?)\b": "correct, incorrect",
    r"\b(?:teach|teaches|taught) (?:nothing|something|anything|the most)\b": "is informative",
    r"\bso[- ]many(?:eth)?\b(?! that)": "the number of ..., or n",
    r"\bfor want of\b": "because there is no",
    r"(?:[;,] |^(?-i:(?=E)))else(?=,? \w)(?! if)": "otherwise",
    r"\bdo(?:es)? without(?=[.,;)]|$)": "does not do that",
    r"\bto the bit\b": "bit for bit",
    r"\bbarren\b|\bhalf[- ]asked\b|\bfloors\b": "empty rollout, partial group, layers",
    r"(?<!if )(?<!and )\bnone (?:has|have|is|are) (?!of)": "no ... is",
    r"^(?-i:Nor)\b": "nor in the same sentence, or: also not",
}
DOCSTRING_STARTS = re.compile(r"(?:What|Where|How|Which|That|So|Who|Of|Says|Tells)\b")

# Fragments in which one of these is meant.
JUSTIFIED = ("Where things live",)  # a heading that says what the paragraph lists


def parse(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield the texts of a Python file: kind, line and words of each docstring, comment and message."""
    tree = ast.parse(text)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(first.value)
                yield "docstring", first.lineno, str(first.value.value)
    inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield "message", node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in docstrings and node not in inside and " " in node.value:
                yield "message", node.lineno, node.value
    block: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if block and (token.start[0] > block[-1].start[0] + 1 or token.start[1] != block[-1].start[1]):
                yield "comment", block[0].start[0], "\n".join(each.string.lstrip("# ") for each in block)
                block = []
            block.append(token)
    if block:
        yield "comment", block[0].start[0], "\n".join(each.string.lstrip("# ") for each in block)


def texts(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield kind, line and words of everything in a file that a person reads."""
    if path.suffix == ".py":
        yield from parse(path.read_text())
    elif path.suffix == ".ipynb":
        for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "markdown":
                yield "page", number, cell.source
            else:
                yield from parse(re.sub(r"^( *)[%!].*$", r"\1pass", cell.source, flags=re.MULTILINE))
    elif path.suffix in (".yaml", ".toml"):
        yield "comment", 1, "\n".join(line.partition("#")[2].strip() for line in path.read_text().splitlines())
    else:
        yield "page", 1, re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def find(kind: str, line: int, text: str) -> Iterator[str]:
    """Yield each calque of a text: the line where the text begins, what is around it and what to write instead."""
    paragraphs = re.split(r"\n\s*\n|\n\s*(?=[-*|] )", text.strip())
    text = "\n".join(re.sub(r"\s+", " ", paragraph).lstrip("-*|# ") for paragraph in paragraphs)
    for pattern, instead in CALQUES.items():
        pattern = pattern.replace("^", r"(?:\A|(?<=[.:;!?|] )|(?<=\n))")
        for match in re.finditer(pattern, text, flags=re.IGNORECASE):
            around = text[max(0, match.start() - 40) : match.end() + 40]
            if not any(each in around for each in JUSTIFIED):
                yield f"{line}: {around!r}: not {match[0]!r}, but {instead!r}"
    if kind == "docstring" and DOCSTRING_STARTS.match(text):
        yield f"{line}: {text[:60]!r}: begin with what it does, or with a noun"


def files() -> list[Path]:
    """Return the files that are checked."""
    found = [path for path in ROOT.glob("*") if path.suffix in (".md", ".toml")]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return sorted(path for path in found if path != Path(__file__) and "outputs" not in path.parts)


@pytest.mark.parametrize(
    "text",
    [
        "`a` is no file.",
        "It saves memory beside GRPO.",
        "4,096 tokens a step",
        "Where it fits, nothing is said.",
        "the first one in place of the second",
        "Of several functions, name one.",
        "Rows go on from here.",
        "a completion that is right",
        "so many prompts",
        "set it; else leave it out",
    ],
)
def test_a_calque_is_found(text):
    assert len(list(find("message", 1, text))) == 1


def test_plain_english_and_what_only_looks_like_a_calque_pass():
    text = "There is no such file. It is no longer true. Of course. Where does it go? Right sides, as far as they are."
    assert list(find("message", 1, text)) == []
    assert len(list(find("docstring", 7, "What it does."))) == 1


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_in_plain_english(path):
    assert [found for each in texts(path) for found in find(*each)] == []
