# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A command's options, from the keywords of the function that it calls."""

import argparse
import inspect
from typing import get_args


def read_options(function, prog, description, argv=None):
    """
    The keywords of a call of `function`, those alone that were given.

    An option has the type of its default, or is annotated with it. `False` is a flag, a tuple all that may be chosen,
    again and again, and without a default it must be given. Numbers are above 0, but for a seed.
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
            parser.add_argument(flag, choices=default, action="append", help="may be given again (default: all)")
        elif default is None:  # annotated as a type or none
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
