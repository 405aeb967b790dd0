# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Each field is described only in the docstring of its class, from which the command line and the docs are made."""

import dataclasses

import pytest

from trl_dapo import DAPOConfig
from trl_dapo.cli.train import TOOLS, LaunchArguments, make_parser
from trl_dapo.rewards.names import REWARD_FUNCS
from trl_dapo.settings.help import Entry, help_from_docstring, read_fields


DOC = """
    Things that a walk needs.

    Args:
        > Shoes

        boots (`bool`, *optional*, defaults to `True`):
            Whether to wear boots. See [`~trl.GRPOConfig`] and
            [`Socks`].
        laces (`list[str]` or `str`):
            Their colours.

        > Food

        bread (`float`, *optional*):
            In kg.

    Raises:
        ValueError (`never`):
            Hardly ever.
    """


def test_fields_are_read_from_a_docstring_with_headings_defaults_and_references():
    assert read_fields(DOC) == {
        "boots": Entry("Shoes", "True", "Whether to wear boots. See `GRPOConfig` and `Socks`."),
        "laces": Entry("Shoes", None, "Their colours."),
        "bread": Entry("Food", None, "In kg."),
    }
    assert read_fields("One line.") == {}
    with pytest.raises(ValueError, match=r"has a line 'laces \(list\):', which is neither a field nor"):
        read_fields(DOC.replace("laces (`list[str]` or `str`):", "laces (list):"))


@pytest.mark.parametrize(
    ("doc", "fields", "message"),
    [
        ("\nArgs:\n    pace (`float`):\n        In km/h.", ["pace", "way"], "does not describe the field 'way'"),
        ("\nArgs:\n    pace (`float`):\n", ["pace"], "does not describe the field 'pace'"),
        ("\nArgs:\n    pase (`float`):\n        In km/h.", ["pace"], "describes 'pase', which is not a field"),
    ],
)
def test_a_field_without_an_entry_and_an_entry_without_a_field_are_refused(doc, fields, message):
    with pytest.raises(ValueError, match=f"The docstring of `Stroll` {message}"):
        help_from_docstring(dataclasses.make_dataclass("Stroll", fields, namespace={"__doc__": doc}))


@pytest.mark.parametrize("cls", [DAPOConfig, LaunchArguments])
def test_every_field_that_the_command_line_takes_shows_its_entry_and_its_default(cls):
    entries = read_fields(cls.__doc__)
    own = [each for each in dataclasses.fields(cls) if each.name in cls.__annotations__]
    assert len(own) >= 12
    texts = {each.name: entries[each.name].text.replace("%", "%%") for each in own}  # argparse formats help with `%`
    assert {each.name: each.metadata["help"] for each in own} == texts
    for each in own:
        default = each.default_factory() if each.default is dataclasses.MISSING else each.default
        stated = entries[each.name].default
        assert (None if stated is None else eval(stated)) == default, each.name


def test_help_of_the_command_line_names_rewards_and_tools_and_ends_with_defaults():
    shown = " ".join(make_parser().format_help().split())
    for name in (*REWARD_FUNCS, *TOOLS):
        assert f"`{name}`" in shown
    assert "Number of prompts in a rollout batch. The paper uses 512." in shown
    assert "A completion is correct if its task reward exceeds this value. (default: 0.0)" in shown
