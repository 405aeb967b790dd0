# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The options of a command, from the keywords of the function that it calls."""

import argparse
import inspect
from typing import get_args


def read_options(function, prog, description, argv=None):
    """
    Return the keywords for a call of `function` that were given on the command line.

    The type of an option is that of its default, or its annotation. A default of `False` makes a flag, a tuple makes a
    choice that may be given several times, and an option without a default is required. Numbers must be above 0,
    except for a seed.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    for option, parameter in inspect.signature(function).parameters.items():
        flag, default = f"--{option.replace('_', '-')}", parameter.default
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(
                flag, choices=default, action="append", help="may be given several times (default: all)"
            )
        elif default is None:  # annotated as a type or `None`
            parser.add_argument(flag, type=get_args(parameter.annotation)[0])
        elif default is parameter.empty:
            parser.add_argument(flag, type=parameter.annotation, required=True)
        else:
            parser.add_argument(flag, type=type(default), help=f"default: {default}")
    given = vars(parser.parse_args(argv))
    for option, value in given.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and option != "seed" and value <= 0:
            parser.error(f"--{option.replace('_', '-')} must be above 0, got {value}")
    return given
