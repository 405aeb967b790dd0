# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `trl-dapo train`, from a recipe to a trained model. `recipes/train_dapo.py` uses the same functions."""

import argparse
import gc
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import datasets
import torch
import trl
from accelerate import PartialState
from transformers.training_args import OptimizerNames
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts import grpo
from trl.scripts.utils import DatasetConfig

from .. import data
from ..config import DAPOConfig
from ..plan.recipe import read_values
from ..rewards.names import REWARD_FUNCS, load_reward, read_math_problems
from ..run.checkpoint import find_checkpoint, last_complete_checkpoint, output_folder, why_incomplete
from ..run.peak_memory import ran_out_of_memory
from ..run.scratch import scratch_folder
from ..settings.arguments import (
    _read_recipe,
    check_model_path,
    load_function,
    names_of_options,
    one_line,
    refuse_unknown_fields,
)
from ..settings.help import help_from_docstring
from ..tools import calculate
from ..update.patching import patched
from . import processes
from .processes import print_once, split_options


if TYPE_CHECKING:
    from ..trainer import DAPOTrainer


# Advice that is added to a message, by a part of the message.
HINTS = {
    "bf16/gpu": "To train on the CPU, which is slow for a large model, add `--bf16 false`, and if the recipe sets "
    "them, `--use_vllm false` and `--attn_implementation sdpa`. To try out a run, use `--config smoke_cpu`. `trl-dapo "
    "plan` shows what a recipe needs.",
    "none of the known schemas": "With your own reward functions a file only needs a column `prompt`, and keeps all "
    "other columns, if neither `prompt_style` nor `on_bad_rows` is set.",
    "requires `solution`, which": "Set `prompt_style` to read a file as math problems, whose gold answers become the "
    "column `solution`.",
    "Its columns are `prompt`, `solution`, `source`, `id`": "These are the columns of math problems, made when the "
    "file is read: `solution` is the gold answer, whatever its name in the file. A file with a column `prompt` keeps "
    "its own columns if neither `prompt_style` nor `on_bad_rows` is set.",
    "number of generations used for evaluation": "Set `per_device_eval_batch_size` to a multiple of "
    "`num_generations_eval`, which is `num_generations` by default.",
    "has no split": "Name its splits with `dataset_train_split` and `dataset_test_split`. If it has none to evaluate "
    "on, set `eval_strategy: 'no'`, or `test_split_size` together with `datasets`.",
    "argument --dynamic_sampling_mode/--dynamic-sampling-mode: invalid choice": "To turn dynamic sampling off, use "
    "`--use_dynamic_sampling false`.",
    "not found in the base model": "Use `--lora_target_modules all-linear`, which works for any model.",
}
MISTAKE, FOUND_NOTHING, DOES_NOT_FIT = 2, 3, 4  # exit statuses; 1 is that of an unexpected error
INTERRUPTED = 130  # as a shell reports Ctrl-C
MISTAKES = (ValueError, OSError, ImportError)  # errors that a user can correct
TOOLS = {"calculate": calculate}
# If one of these is set, or the dataset is a file, `trl_dapo.data` reads the data, and otherwise TRL's script.
PROBLEM_FIELDS = ("prompt_style", "on_bad_rows", "dataset_offset", "dataset_limit", "eval_dataset_name")
ROW_FIELDS = ("datasets", "dataset_streaming", "streaming", "test_split_size")
# Settings that have no effect without another setting, and the name of that setting.
NEEDED_SETTINGS = dict.fromkeys(("streaming", "test_split_size"), "datasets")
NEEDED_SETTINGS |= dict.fromkeys(
    ("eval_dataset_split", "eval_dataset_offset", "eval_dataset_limit"), "eval_dataset_name"
)
NEEDED_SETTINGS |= {
    each.name: "use_peft" for each in fields(ModelConfig) if "lora" in each.name or each.name == "use_dora"
}
# Optional packages, by the settings that need them.
PACKAGES = dict.fromkeys(("load_in_4bit", "load_in_8bit"), "bitsandbytes")
PACKAGES |= {"use_vllm": "vllm", "use_liger_kernel": "liger_kernel"}
TRACKERS = ("wandb", "trackio", "mlflow", "swanlab", "comet_ml", "clearml")
OF_BITSANDBYTES = re.compile("bnb|paged|ademamix|lion_|(?<!torch_)8bit")


@help_from_docstring
@dataclass
class LaunchArguments(grpo.GRPOScriptArguments, DatasetMixtureConfig):
    """
    Fields of a recipe in addition to those of [`DAPOConfig`] and [`~trl.ModelConfig`]: those of `trl grpo`, and these.

    Args:
        dataset_name (`str`, *optional*):
            Training prompts: a file, also relative to the folder named by `TRL_DAPO_DATA`, or a dataset on the Hub.
            Rows with a `prompt` are used unchanged, as in `trl grpo`. They are read as math problems if all reward
            functions are of this package, or if `prompt_style` or `on_bad_rows` is set.
        dataset_offset (`int`, *optional*, defaults to `0`):
            Number of problems to skip.
        dataset_limit (`int`, *optional*):
            Largest number of problems to train on. Defaults to all.
        eval_dataset_name (`str`, *optional*):
            Evaluation prompts, in the same form as `dataset_name`.
        eval_dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of an evaluation dataset on the Hub.
        eval_dataset_offset (`int`, *optional*, defaults to `0`):
            Number of problems to skip.
        eval_dataset_limit (`int`, *optional*):
            Largest number of problems to evaluate on. Defaults to all.
        prompt_style (`str`, *optional*):
            What the prompt of a math problem asks for: `"answer_line"` (as in the paper), `"boxed"`, `"think"` or
            `"as_is"`. The default for math problems is the style that the first reward function reads: `"answer_line"`
            for `dapo_math`, `"boxed"` for `math_verify` and `accuracy_reward`, and `"as_is"` for others.
        on_bad_rows (`str`, *optional*, defaults to `"error"`):
            What to do with rows without a problem or a gold answer, in both datasets: `"error"` or `"skip"`.
        reward_funcs (`list[str]`, *optional*):
            `dapo_math`, `math_verify`, `last_number`, `bare_number`, a reward function of `trl grpo` such as
            `accuracy_reward`, or a dotted import path. Defaults to `dapo_math` if there is no
            `reward_model_name_or_path`.
        tools (`list[str]`, *optional*):
            Functions that the model may call, as in [`~trl.GRPOTrainer`]: `calculate`, or a dotted import path.
        tiny_model (`bool`, *optional*, defaults to `False`):
            Whether to train a small random model that is created for the run, instead of `model_name_or_path`.
        trial (`bool`, *optional*, defaults to `False`):
            Whether to try out the run instead of training. Every phase of the run is tried once on this machine.
            Memory and seconds of each phase are printed, together with an estimate for the whole run. Nothing is
            written. The exit status is 0 if the run fits and 4 if it does not.
    """

    dataset_name: str | None = None
    dataset_offset: int = 0
    dataset_limit: int | None = None
    eval_dataset_name: str | None = None
    eval_dataset_split: str = "train"
    eval_dataset_offset: int = 0
    eval_dataset_limit: int | None = None
    prompt_style: str | None = field(default=None, metadata={"choices": list(data.PROMPT_STYLES)})
    on_bad_rows: str = field(default="error", metadata={"choices": list(data.BAD_ROWS)})
    reward_funcs: list[str] | None = None
    tools: list[str] | None = None
    tiny_model: bool = False
    trial: bool = False

    def __post_init__(self) -> None:
        for each in (each for each in self.datasets if not isinstance(each, DatasetConfig)):
            if not isinstance(each, dict) or "path" not in each:
                raise ValueError(
                    f"`datasets` contains {each!r}, which has no `path`. Write each dataset as `- path: NAME`."
                )
            refuse_unknown_fields("a dataset of `datasets`", each, DatasetConfig.__dataclass_fields__)
        super().__post_init__()


class _Parser(TrlParser):
    """TRL's parser, but a mistake raises a `ValueError`, and misspelt fields are found before a config is created."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        kwargs = {name: value for name, value in kwargs.items() if name not in self.launch_options}
        refuse_unknown_fields("the recipe", kwargs, self._fields, self.launch_options)
        return super().set_defaults_with_config(**read_values(kwargs))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, others = super().parse_known_args(args, namespace)
        refuse_unknown_fields(None, names_of_options(others), self._fields, ["config", *self.launch_options])
        if others:
            raise ValueError(
                f"`{others[0]}` is not the value of an option. Write options as `--field value`, and put values with "
                "spaces in quotes."
            )
        return namespace, others

    @property
    def _fields(self) -> list[str]:
        return [action.dest for action in self._actions]

    @cached_property
    def launch_options(self) -> dict[str, bool]:
        """Options of `accelerate launch`, which a recipe may contain, too, and whether each takes a value."""
        return processes.options_of_accelerate(self._fields)


def make_parser() -> _Parser:
    """Return the parser of recipes and command lines."""
    parser = _Parser(
        (LaunchArguments, DAPOConfig, ModelConfig),  # type: ignore[arg-type]  # dataclasses have no type of their own
        prog="trl-dapo train",
        usage="trl-dapo train --config RECIPE.yaml [--trial] [--field value ...] [--num_processes N] "
        "[--accelerate_config FILE]",
        allow_abbrev=False,
    )
    # The help lists about three hundred fields. Those of this package come first.
    others = parser._optionals
    parser._action_groups.remove(others)
    for title, shown in (
        ("data and rewards", LaunchArguments.__dataclass_fields__),
        ("DAPO: what DAPOConfig adds or changes", DAPOConfig.__annotations__),
        ("model", ModelConfig.__dataclass_fields__),
    ):
        group = parser.add_argument_group(title)
        group._group_actions += [action for action in others._group_actions if action.dest in shown]
        others._group_actions = [action for action in others._group_actions if action.dest not in shown]
    for action in parser._actions:
        if action.option_strings and action.option_strings[0].startswith("--no_"):
            action.help, action.default = f"set `{action.dest}` to False", argparse.SUPPRESS
    others.title = "GRPOConfig and TrainingArguments"
    parser._action_groups.append(others)
    return parser


def _check_settings_for(num_processes: int, is_chosen: bool, parser: _Parser, argv: Sequence[str]) -> None:
    """
    Check the settings as each of several processes will. `is_chosen` says whether the command line has their number.
    """
    try:
        with processes.pretending_to_be_one_of(num_processes):
            trainer_arguments(*read_settings(parser, argv))
    except ValueError as error:
        if is_chosen or f"{num_processes} processes" not in str(error):
            raise
        raise ValueError(
            f"{error} The {num_processes} processes are those of the accelerate config. If this machine has fewer "
            "GPUs, add `--num_processes N`."
        ) from None


def launch(argv: Sequence[str]) -> int:
    """Run `trl-dapo train` with a command line, in one or several processes, and return the exit status."""
    try:
        parser = make_parser()
        launch_options, argv = split_options(argv, parser.launch_options)
        if launch_options and processes.is_launched():
            raise ValueError(
                f"`{launch_options[0]}` is an option of the launcher, which has started this process already. Pass it "
                "to the launcher."
            )
        if "--config" in argv and not processes.is_launched():
            recipe = _read_recipe(argv[argv.index("--config") + 1])
            words = [f"--{name}={value}" for name, value in recipe.items() if value is not None]
            launch_options = split_options(words, parser.launch_options)[0] + launch_options
        if launch_options:
            launcher_args = processes.read_options(launch_options, argv)
            if not launcher_args.machine_rank:  # the first machine checks the settings for all
                num_processes = launcher_args.num_processes or max(torch.cuda.device_count(), 1)
                is_chosen = any(option.startswith("--num_processes") for option in launch_options)
                _check_settings_for(num_processes, is_chosen, parser, argv)
            return processes.launch_processes(launcher_args)
        launch_args, training_args, model_args = read_settings(parser, argv)
        # The first process downloads the data, and the others read it from the cache.
        failure, arguments = None, {}
        with PartialState().local_main_process_first():
            try:
                arguments = trainer_arguments(launch_args, training_args, model_args)
            except MISTAKES as error:
                failure = error  # raised below, because the other processes wait at the end of this block
        if failure is not None:
            raise failure
    except MISTAKES as error:
        return report_mistake(error)
    except KeyboardInterrupt:
        print("trl-dapo train: stopped before it began.", file=sys.stderr)
        return INTERRUPTED
    # Imported here, so that a mistake in the recipe is reported without waiting for these imports.
    from ..run.preflight import SetupError
    from ..run.terminal import progress_bars_on_terminals_only, wrapped_for

    try:
        with progress_bars_on_terminals_only():
            run = run_trial if launch_args.trial else train
            status = run(launch_args, training_args, arguments)
    except SetupError as error:
        status = report_mistake(error)
    except KeyboardInterrupt:
        status = INTERRUPTED
    # The trainer is part of reference cycles and keeps the process group alive. The threads of the process group must
    # end before the interpreter does. Otherwise a thread that asks for the interpreter's lock aborts the process,
    # although its run was complete. This also removes the progress bar.
    gc.collect()
    if status == INTERRUPTED and launch_args.trial:
        print_once("trl-dapo train: the trial was stopped. Nothing was written.")
    elif status == INTERRUPTED and PartialState().is_main_process:
        folder = output_folder(training_args)
        line = f"stopped. {folder} contains no complete checkpoint, so the same command starts from the beginning."
        if (checkpoint := last_complete_checkpoint(folder)) is not None:
            line = f"stopped. The same command with `--resume_from_checkpoint true` continues from {checkpoint}."
        line = wrapped_for(sys.stderr, f"trl-dapo train: {line}")
        if sys.stderr.isatty():
            line = f"\n{line}"  # the terminal shows `^C` at the cursor
        print(line, file=sys.stderr)
    return status


def report_mistake(error: Exception) -> int:
    """Print an error that the user can correct in one line, with hints, and return the exit status."""
    message = one_line(error)
    hints = [hint for part, hint in HINTS.items() if part in message]
    print_once(" ".join(["trl-dapo train:", message, *hints]))
    return MISTAKE


def read_settings(parser: _Parser, argv: Sequence[str]) -> tuple[LaunchArguments, DAPOConfig, ModelConfig]:
    """Return the settings of a recipe and a command line. The checkpoint to resume from is replaced by its path."""
    launch_args, training_args, model_args = parser.parse_args_and_config(argv)
    if not launch_args.tiny_model and model_args.model_name_or_path is None:
        raise ValueError("`model_name_or_path` is not set. Name a model, or set `tiny_model: true` to try out a run.")
    trained = None if launch_args.tiny_model else model_args.model_name_or_path
    for name in filter(None, (trained, launch_args.reward_model_name_or_path)):
        check_model_path(name)
    check_needed_settings(argv, launch_args, model_args)
    refuse_missing_packages(training_args, model_args)
    training_args.resume_from_checkpoint = checkpoint_to_resume(training_args)
    folder = Path(output_folder(training_args))
    there, file = ("model", "config.json") if model_args.use_peft else ("adapter", "adapter_config.json")
    if (folder / file).exists():
        raise ValueError(
            f"`output_dir` {folder} contains the {there} of another run (`{file}`). If a folder contains a model and "
            "an adapter, neither is loaded correctly. Set another `output_dir`, or delete this folder."
        )
    return launch_args, training_args, model_args


def check_needed_settings(argv: Sequence[str], *settings: Any) -> None:
    """
    Raise a `ValueError` for a setting that has no effect without another one.

    If the command line turns off the other setting of a recipe, the setting is reset to its default instead.
    """
    known = {name: value for each in settings for name, value in vars(each).items()}
    on_command_line = names_of_options(argv)
    for args in settings:
        for setting in fields(args):
            name = setting.name
            if name not in NEEDED_SETTINGS or known[name] == setting.default:
                continue
            needed = NEEDED_SETTINGS[name]
            if known[needed]:
                continue
            if needed not in on_command_line or name in on_command_line:
                raise ValueError(
                    f"`{name}={known[name]!r}` has no effect without `{needed}`. Set `{needed}`, or leave `{name}` "
                    f"out."
                )
            setattr(args, name, setting.default)


def refuse_missing_packages(training_args: DAPOConfig, model_args: ModelConfig) -> None:
    """
    Raise an `ImportError` if the settings need a package that is not installed.

    Otherwise every process would fail later, when the trainer is created.
    """
    known = {**vars(model_args), **vars(training_args)}
    needed = [(f"{name}={known[name]}", package) for name, package in PACKAGES.items() if known[name]]
    needed += [(f"report_to={name!r}", name) for name in training_args.report_to or () if name in TRACKERS]
    if OF_BITSANDBYTES.search(training_args.optim):
        needed.append((f"optim={OptimizerNames(training_args.optim).value!r}", "bitsandbytes"))
    for setting, package in needed:
        if find_spec(package) is None:
            # The extra of TRL installs a version of vLLM that TRL supports.
            install = "'trl[vllm]'" if package == "vllm" else package
            raise ImportError(f"`{setting}` needs {package}, which is not installed. Run `pip install {install}`.")


def train(launch_args: LaunchArguments, training_args: DAPOConfig, arguments: dict[str, Any]) -> int:
    """Train with the trainer's arguments, save the model or adapter to `output_dir`, and return the exit status."""
    trainer = make_trainer(launch_args, training_args, arguments)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    if not trainer.stop.found_nothing:
        trainer.save_model(training_args.output_dir)
        trainer.accelerator.print(f"Saved to {training_args.output_dir}.")
        if training_args.push_to_hub:
            trainer.push_to_hub(dataset_name=launch_args.dataset_name)
    trainer.accelerator.end_training()
    return FOUND_NOTHING if trainer.stop.found_nothing else 0


def run_trial(launch_args: LaunchArguments, training_args: DAPOConfig, arguments: dict[str, Any]) -> int:
    """Try out a training run, print the report, and return 0 if the run fits and `DOES_NOT_FIT` if it does not."""
    # When a trainer is created, it creates its output folder, and its trackers may begin a run.
    training_args.report_to, training_args.push_to_hub = [], False
    try:
        with scratch_folder(training_args.output_dir) as training_args.output_dir:
            trainer = make_trainer(launch_args, training_args, arguments)
            report = trainer.trial()
            trainer.accelerator.print(f"\n{report}")
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        # While the model was loaded, or in a phase in which other processes wait for this one.
        where = getattr(error, "__notes__", ["This happened before the first phase of the trial."])
        print_once(f"trl-dapo train: memory ran out. {one_line(error)} {' '.join(where)}")
        return DOES_NOT_FIT
    trainer.accelerator.end_training()
    return 0 if report.fits else DOES_NOT_FIT


def make_trainer(launch_args: LaunchArguments, training_args: DAPOConfig, arguments: dict[str, Any]) -> "DAPOTrainer":
    """Return a trainer with these arguments. Errors that the user can correct become a `SetupError`."""
    from ..run.preflight import SetupError
    from ..run.terminal import wrapped_for
    from ..trainer import DAPOTrainer

    if PartialState().is_main_process:
        print(wrapped_for(sys.stdout, training_args.batch_arithmetic))
        print(f"Loading {arguments['model'] if not launch_args.tiny_model else 'a tiny model'}.", flush=True)
    try:
        if launch_args.tiny_model:
            arguments["model"] = tiny_model(training_args)
        return DAPOTrainer(**arguments)
    except MISTAKES as error:
        raise SetupError(str(error)) from error


class _TrainerArguments(Exception):
    """Raised instead of creating a trainer. It contains the arguments that TRL's script passes to its trainer."""


def trainer_arguments(
    launch_args: LaunchArguments, training_args: DAPOConfig, model_args: ModelConfig
) -> dict[str, Any]:
    """
    Return the arguments of a trainer.

    They are those of `trl grpo` for the same settings, but with the math problems and tools of this package.
    """

    def raise_arguments(**arguments: Any) -> NoReturn:
        raise _TrainerArguments(arguments)

    name_of_dataset = launch_args.dataset_name
    script_args = replace(launch_args, reward_funcs=[_name_for_trl(name) for name in _reward_names(launch_args)])
    problems = load_datasets(launch_args, training_args) if reads_problems(launch_args) else None
    loaded = patched(datasets, load_dataset=lambda *_, **__: defaultdict(lambda: None)) if problems else nullcontext()
    arguments: dict[str, Any] = {}
    try:
        naming_missing_data = data.naming_missing_data(None if problems else name_of_dataset)
        with patched(trl, GRPOTrainer=raise_arguments), loaded, naming_missing_data:
            grpo.main(script_args, training_args, model_args, script_args)
    except _TrainerArguments as raised:
        (arguments,) = raised.args
    except KeyError as error:
        split = error.args[0]
        if split not in (launch_args.dataset_train_split, launch_args.dataset_test_split):
            raise
        raise ValueError(f"The dataset has no split {split!r}.") from None
    if problems:
        arguments["train_dataset"], arguments["eval_dataset"] = problems
    if training_args.eval_on_start and arguments["eval_dataset"] is None:
        raise ValueError(
            "`eval_on_start=True` needs a dataset to evaluate on, which is only loaded if `eval_strategy` is set. Set "
            "`eval_strategy`, or leave `eval_on_start` out."
        )
    arguments["tools"] = [load_function("tools", name, TOOLS) for name in launch_args.tools or []] or None
    return arguments


def _reward_names(launch_args: LaunchArguments) -> list[str]:
    names = launch_args.reward_funcs or ([] if launch_args.reward_model_name_or_path else ["dapo_math"])
    return [str(name) for name in names]


def _reward_funcs(launch_args: LaunchArguments) -> list[Any]:
    """Return the reward functions, and the name of the reward model if there is one."""
    model = launch_args.reward_model_name_or_path
    return [load_reward("reward_funcs", name) for name in _reward_names(launch_args)] + ([model] if model else [])


def _name_for_trl(name: str) -> str:
    """Return the name by which TRL's script finds a reward function: one that it knows, or a dotted import path."""
    function = load_reward("reward_funcs", name)
    return f"{function.__module__}.{function.__name__}" if name in REWARD_FUNCS else name


def reads_problems(launch_args: LaunchArguments) -> bool:
    """Return whether this package reads the data instead of TRL's script: files, and math problems on the Hub."""
    defaults = {each.name: each.default for each in fields(launch_args)}
    set_fields = [name for name in PROBLEM_FIELDS if getattr(launch_args, name) != defaults[name]]
    if data.is_file_name(launch_args.dataset_name or ""):
        set_fields.append("dataset_name")
        check_file_settings(launch_args)
    others = [name for name in ROW_FIELDS if getattr(launch_args, name)]
    if set_fields and others:
        name = set_fields[0]
        raise ValueError(
            f"`{others[0]}` contradicts `{name}={getattr(launch_args, name)!r}`: the former is for rows that TRL "
            "reads unchanged, the latter for data that this package reads. Leave out one of them."
        )
    rewards = [] if others else _reward_funcs(launch_args)
    if not launch_args.dataset_name:
        return False
    if set_fields:
        return True
    return bool(rewards) and read_math_problems(rewards)


def check_file_settings(launch_args: LaunchArguments) -> None:
    """Raise a `ValueError` if a split or a configuration is set for a local file, which has neither."""
    defaults = {each.name: each.default for each in fields(launch_args)}
    for name in ("dataset_train_split", "dataset_config"):
        value = getattr(launch_args, name)
        if value != defaults[name]:
            raise ValueError(
                f"`{name}={value!r}` has no effect: `dataset_name={launch_args.dataset_name!r}` is a file, which has "
                "neither splits nor configurations. Leave it out, or name a dataset on the Hub."
            )


def load_datasets(
    launch_args: LaunchArguments, training_args: DAPOConfig
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Return the training prompts, and the evaluation prompts if there are any, from another dataset or split."""
    eval_name, eval_split = launch_args.eval_dataset_name, launch_args.eval_dataset_split
    is_file = data.is_file_name(launch_args.dataset_name or "")
    for name, off in (("eval_strategy", "no"), ("eval_on_start", False)):
        value = getattr(training_args, name)
        if eval_name is None and value != off and is_file:
            value = getattr(value, "value", value)  # the value of an enumeration member
            raise ValueError(
                f"`{name}={value!r}` needs a dataset to evaluate on. Set `eval_dataset_name`, or `{name}: {off!r}`."
            )
    if eval_name is None and not is_file and training_args.eval_strategy != "no":
        eval_name, eval_split = launch_args.dataset_name, launch_args.dataset_test_split
    train_dataset = _load_dataset(launch_args, "", launch_args.dataset_name, launch_args.dataset_train_split)
    if eval_name is None:
        return train_dataset, None
    eval_dataset = _load_dataset(launch_args, "eval_", eval_name, eval_split)
    data.refuse_overlap(train_dataset, eval_dataset)
    return train_dataset, eval_dataset


def _load_dataset(args: LaunchArguments, prefix: str, name: str | None, split: str) -> datasets.Dataset:
    assert name is not None  # checked by `reads_problems`
    config = args.dataset_config if name == args.dataset_name else None
    style = data.choose_prompt_style(
        name,
        split,
        config,
        reward_funcs=_reward_funcs(args),
        prompt_style=args.prompt_style,
        on_bad_rows=args.on_bad_rows,
    )
    offset, limit = (getattr(args, f"{prefix}dataset_{part}") for part in ("offset", "limit"))
    return data.load_prompts(name, style, split, config, offset, limit, args.on_bad_rows)


def checkpoint_to_resume(training_args: DAPOConfig) -> str | None:
    """Return the path of the checkpoint in `resume_from_checkpoint`. `true` means the last complete one."""
    setting = training_args.resume_from_checkpoint
    if setting is None or str(setting).lower() == "false":
        return None
    if str(setting).lower() != "true":
        why = why_incomplete(Path(setting)) if Path(setting).is_dir() else "there is no such folder"
        if why is not None:
            raise FileNotFoundError(
                f"`resume_from_checkpoint={setting}` is not a complete checkpoint: {why}. Name another one, or set "
                "`true` for the last complete one."
            )
        return setting
    return find_checkpoint(output_folder(training_args))


def tiny_model(training_args: DAPOConfig) -> str:
    """Create a random model with about 0.1 million parameters in `output_dir/tiny_model`, and return its path."""
    from . import tiny

    path = Path(output_folder(training_args)) / "tiny_model"
    with PartialState().local_main_process_first():
        if not (path / "config.json").exists():
            tokenizer = tiny.build_tiny_tokenizer()
            tiny.save(tiny.build_tiny_model(tokenizer, training_args.seed), tokenizer, path)
    return str(path)
