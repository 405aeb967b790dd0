# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""From a recipe to a trained model: what `recipes/train_dapo.py` and `trl-dapo train` share."""

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
import trl.rewards
from accelerate import PartialState
from transformers.training_args import OptimizerNames
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts import grpo
from trl.scripts.utils import DatasetConfig

from .. import data
from ..config import DAPOConfig
from ..plan.recipe import read_values
from ..rewards.names import REWARD_FUNCS, read_math_problems
from ..run.checkpoint import find_checkpoint, last_complete_checkpoint, output_folder
from ..run.scratch import scratch_folder
from ..settings.arguments import _read_recipe, check_model_path, load_function, one_line, refuse_unknown_fields
from ..settings.help import help_from_docstring
from ..tools import calculate
from ..update.patching import patched
from . import processes
from .processes import split_options, tell_once


if TYPE_CHECKING:
    from ..trainer import DAPOTrainer


# What others' messages leave out, by a part of them.
WAYS_OUT = {
    "bf16/gpu": "Without a GPU `--bf16 false` trains on the CPU, a large model slowly; `--config smoke_cpu` tries out "
    "a run, and `trl-dapo plan` tells what a recipe needs.",
    "none of the known schemas": "For rewards of your own a file needs a column `prompt`, and keeps all others, "
    "if neither `prompt_style` nor `on_bad_rows` is set.",
    "asks for `solution`, which": "A `prompt_style` has the gold answers of math problems read as `solution`.",
    "its columns are `prompt`, `solution`, `source`, `id`": "The math loader has read these from the file's. Without "
    "`prompt_style` and `on_bad_rows` a file with a column `prompt` keeps its own.",
    "number of generations used for evaluation": "Set `per_device_eval_batch_size` to a multiple of "
    "`num_generations_eval`, which is `num_generations` where it is not set.",
    "The dataset has no split": "`dataset_train_split` and `dataset_test_split` name its splits; without one to "
    "evaluate on, set `eval_strategy: 'no'`, or `test_split_size` together with `datasets`.",
    "not found in the base model": "`--lora_target_modules all-linear` names every linear layer of any model.",
}
MISFIT, MISTAKE, FOUND_NOTHING, INTERRUPTED = 1, 2, 3, 130  # exit statuses; a shell's own for Ctrl-C
MISTAKES = (ValueError, OSError, ImportError)  # what a user can mend
TOOLS = {"calculate": calculate}
# A recipe that says one of these, or names a file, has its data read by `trl_dapo.data`, not by TRL's script.
OF_PROBLEMS = ("prompt_style", "on_bad_rows", "dataset_offset", "dataset_limit", "eval_dataset_name")
OF_ROWS = ("datasets", "dataset_streaming", "streaming", "test_split_size")
# What each of these has an effect with.
NEEDED = dict.fromkeys(("streaming", "test_split_size"), "datasets")
NEEDED |= dict.fromkeys(("eval_dataset_split", "eval_dataset_offset", "eval_dataset_limit"), "eval_dataset_name")
NEEDED |= {each.name: "use_peft" for each in fields(ModelConfig) if "lora" in each.name or each.name == "use_dora"}
# Packages that are not this one's requirements, by the settings that ask for them.
PACKAGES = dict.fromkeys(("load_in_4bit", "load_in_8bit"), "bitsandbytes")
PACKAGES |= {"use_vllm": "vllm", "use_liger_kernel": "liger_kernel"}
TRACKERS = ("wandb", "trackio", "mlflow", "swanlab", "comet_ml", "clearml")
OF_BITSANDBYTES = re.compile("bnb|paged|ademamix|lion_|(?<!torch_)8bit")


@help_from_docstring
@dataclass
class LaunchArguments(grpo.GRPOScriptArguments, DatasetMixtureConfig):
    """
    Fields of a recipe besides those of [`DAPOConfig`] and [`~trl.ModelConfig`]: the fields of `trl grpo`, and these.

    Args:
        dataset_name (`str`, *optional*):
            Training prompts: a file, also relative to the folder named by `TRL_DAPO_DATA`, or a dataset on the Hub.
            Rows with a `prompt` are used unchanged, as by `trl grpo`. They are read as math problems if all
            reward functions are of this package, or if `prompt_style` or `on_bad_rows` is set.
        dataset_offset (`int`, *optional*, defaults to `0`):
            Problems passed over at the start.
        dataset_limit (`int`, *optional*):
            Problems to train on, at most.
        eval_dataset_name (`str`, *optional*):
            Evaluation prompts, as `dataset_name`.
        eval_dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of an evaluation dataset on the Hub.
        eval_dataset_offset (`int`, *optional*, defaults to `0`):
            Problems passed over at the start.
        eval_dataset_limit (`int`, *optional*):
            Problems to evaluate on, at most.
        prompt_style (`str`, *optional*):
            How a problem is put to the model: `"answer_line"` (the paper's), `"boxed"`, `"think"` or
            `"as_is"`. Defaults for math problems to what the first reward function reads: `"answer_line"` for
            `dapo_math`, `"boxed"` for `math_verify` and `accuracy_reward`, `"as_is"` for others.
        on_bad_rows (`str`, *optional*, defaults to `"error"`):
            What becomes of rows without a problem or a gold answer, in both datasets: `"error"` or `"skip"`.
        reward_funcs (`list[str]`, *optional*):
            `dapo_math`, `math_verify`, `last_number`, `bare_number`, one of `trl grpo`'s such as `accuracy_reward`, or
            a dotted import path. Defaults to `dapo_math` where there is no `reward_model_name_or_path`.
        tools (`list[str]`, *optional*):
            Functions that the model may call, as [`~trl.GRPOTrainer`] takes them: `calculate`, or a dotted import
            path.
        tiny_model (`bool`, *optional*, defaults to `False`):
            Whether to train a small random model that is made on the spot, instead of `model_name_or_path`.
        trial (`bool`, *optional*, defaults to `False`):
            Whether to try the run out instead of training: each of its phases once, on this machine. Prints memory and
            seconds of each and what is expected of the run, and writes nothing. The exit status is 0 if the run fits
            and 1 if it does not.
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
                raise ValueError(f"`datasets` holds {each!r}. Write each as `- path: NAME`.")
            refuse_unknown_fields("A dataset of `datasets`", each, DatasetConfig.__dataclass_fields__)
        super().__post_init__()


class _Parser(TrlParser):
    """TRL's, which tells a mistake in one line, and a misspelt field before a config is made of the others."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        kwargs = {name: value for name, value in kwargs.items() if name not in self.launch_options}
        refuse_unknown_fields("The recipe", kwargs, self._fields, self.launch_options)
        return super().set_defaults_with_config(**read_values(kwargs))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, others = super().parse_known_args(args, namespace)
        unknown = [word[2:].partition("=")[0].replace("-", "_") for word in others if word.startswith("--")]
        refuse_unknown_fields("The command line", unknown, self._fields, ["config", *self.launch_options])
        if others:
            raise ValueError(f"`{others[0]}` follows no `--field`.")
        return namespace, others

    @property
    def _fields(self) -> list[str]:
        return [action.dest for action in self._actions]

    @cached_property
    def launch_options(self) -> dict[str, bool]:
        """Options of `accelerate launch`, in a recipe too, and whether a value follows each."""
        return processes.options_of_accelerate(self._fields)


def make_parser() -> _Parser:
    """The parser of recipes and command lines: a misspelt key is an error in both."""
    parser = _Parser(
        (LaunchArguments, DAPOConfig, ModelConfig),  # type: ignore[arg-type]  # dataclasses have no type of their own
        prog="trl-dapo train",
        usage="trl-dapo train --config RECIPE.yaml [--trial] [--field value ...] [--num_processes N] "
        "[--accelerate_config FILE]",
        allow_abbrev=False,
    )
    # There are some three hundred fields. Those of this package come first.
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
    others.title = "GRPOConfig and TrainingArguments"
    parser._action_groups.append(others)
    return parser


def launch(argv: Sequence[str]) -> int:
    """Trains what a command line says, in the processes that it asks for; returns the exit status."""
    try:
        parser = make_parser()
        asked, argv = split_options(argv, parser.launch_options)
        if asked and processes.is_launched():
            raise ValueError(f"`{asked[0]}` is for the launcher, which has started this process already.")
        if "--config" in argv and not processes.is_launched():
            recipe = _read_recipe(argv[argv.index("--config") + 1])
            words = [f"--{name}={value}" for name, value in recipe.items() if value is not None]
            asked = split_options(words, parser.launch_options)[0] + asked
        if asked:
            arguments = processes.read_options(asked, argv)
            if not arguments.machine_rank:  # the first machine checks for all
                with processes.believing_in(arguments.num_processes or max(torch.cuda.device_count(), 1)):
                    trainer_arguments(*read_settings(parser, argv))
            return processes.launch_processes(arguments)
        launch_args, training_args, model_args = read_settings(parser, argv)
        # One process reads and caches, the others read the cache.
        failure, given = None, {}
        with PartialState().local_main_process_first():
            try:
                given = trainer_arguments(launch_args, training_args, model_args)
            except MISTAKES as error:
                failure = error  # told once the processes that wait here have come as far
        if failure is not None:
            raise failure
    except MISTAKES as error:
        return tell_mistake(error)
    except KeyboardInterrupt:
        print("trl-dapo train: stopped before it began.", file=sys.stderr)
        return INTERRUPTED
    # Here, so that a mistake in the recipe is told before the models are imported.
    from ..run.preflight import SetupError
    from ..run.terminal import bars_on_terminals_only, wrapped_for

    try:
        with bars_on_terminals_only():
            run = run_trial if launch_args.trial else train
            status = run(launch_args, training_args, given)
    except SetupError as error:
        status = tell_mistake(error)
    except KeyboardInterrupt:
        status = INTERRUPTED
    # The trainer, full of cycles, holds the process group. Its threads must end before the interpreter does: one that
    # then asks for the interpreter's lock aborts the process, and with it a run that was complete. Its bar goes too.
    gc.collect()
    if status == INTERRUPTED and launch_args.trial:
        tell_once("trl-dapo train: the trial was stopped. It has written nothing.")
    elif status == INTERRUPTED and PartialState().is_main_process:
        folder = output_folder(training_args)
        line = f"stopped. {folder} holds no checkpoint yet: the same command starts from the beginning."
        if (checkpoint := last_complete_checkpoint(folder)) is not None:
            line = f"stopped. The same command with `--resume_from_checkpoint true` continues from {checkpoint}."
        line = wrapped_for(sys.stderr, f"trl-dapo train: {line}")
        if sys.stderr.isatty():
            line = f"\n{line}"  # `^C` stands where the cursor is
        print(line, file=sys.stderr)
    return status


def tell_mistake(error: Exception) -> int:
    """Print in one line what the user can correct, and how, and return the exit status."""
    told = one_line(error)
    tell_once(" ".join(["trl-dapo train:", told, *(way_out for part, way_out in WAYS_OUT.items() if part in told)]))
    return MISTAKE


def read_settings(parser: _Parser, argv: Sequence[str]) -> tuple[LaunchArguments, DAPOConfig, ModelConfig]:
    """The settings of a recipe and a command line, with the checkpoint to resume by its path."""
    launch_args, training_args, model_args = parser.parse_args_and_config(argv)
    if not launch_args.tiny_model and model_args.model_name_or_path is None:
        raise ValueError("`model_name_or_path` is not set. Name a model, or set `tiny_model: true` for a trial run.")
    trained = None if launch_args.tiny_model else model_args.model_name_or_path
    for name in filter(None, (trained, launch_args.reward_model_name_or_path)):
        check_model_path(name)
    settle_idle(argv, launch_args, model_args)
    refuse_missing_packages(training_args, model_args)
    training_args.resume_from_checkpoint = checkpoint_to_resume(training_args)
    folder = Path(output_folder(training_args))
    there, file = ("model", "config.json") if model_args.use_peft else ("adapter", "adapter_config.json")
    if (folder / file).exists():  # if a folder has an adapter and a whole model, neither is loaded correctly
        raise ValueError(
            f"`output_dir` {folder} holds the {there} of another run (`{file}`). A model that is saved next to it "
            "could not be loaded. Set another `output_dir`, or delete that one."
        )
    return launch_args, training_args, model_args


def settle_idle(argv: Sequence[str], *settings: Any) -> None:
    """Refuses what has no effect without another setting; unsets a recipe's where the command line turned that off."""
    known = {name: value for each in settings for name, value in vars(each).items()}
    said = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    for args in settings:
        for setting in fields(args):
            name = setting.name
            if name not in NEEDED or known[name] == setting.default:
                continue
            needed = NEEDED[name]
            if known[needed]:
                continue
            if needed not in said or name in said:
                raise ValueError(
                    f"`{name}={known[name]!r}` has no effect without `{needed}`. Set that, or leave it out."
                )
            setattr(args, name, setting.default)


def refuse_missing_packages(training_args: DAPOConfig, model_args: ModelConfig) -> None:
    """Refuses what would be missed only once a trainer is made, by every process."""
    known = {**vars(model_args), **vars(training_args)}
    asked = [(f"{name}={known[name]}", package) for name, package in PACKAGES.items() if known[name]]
    asked += [(f"report_to={name!r}", name) for name in training_args.report_to or () if name in TRACKERS]
    if OF_BITSANDBYTES.search(training_args.optim):
        asked.append((f"optim={OptimizerNames(training_args.optim).value!r}", "bitsandbytes"))
    for setting, package in asked:
        if find_spec(package) is None:
            raise ImportError(f"`{setting}` needs {package}, which is not installed: `pip install {package}`.")


def train(launch_args: LaunchArguments, training_args: DAPOConfig, given: dict[str, Any]) -> int:
    """Trains with what is `given` to the trainer, and saves the model, or the adapter, into `output_dir`."""
    trainer = make_trainer(launch_args, training_args, given)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    if not trainer.stop.found_nothing:
        trainer.save_model(training_args.output_dir)
        trainer.accelerator.print(f"Saved to {training_args.output_dir}.")
        if training_args.push_to_hub:
            trainer.push_to_hub(dataset_name=launch_args.dataset_name)
    trainer.accelerator.end_training()
    return FOUND_NOTHING if trainer.stop.found_nothing else 0


def run_trial(launch_args: LaunchArguments, training_args: DAPOConfig, given: dict[str, Any]) -> int:
    """Try what [`train`] would do, and print the report. Return 0 if the run fits, otherwise `MISFIT`."""
    # A trainer makes its folder when it is made, and its trackers may open a run.
    training_args.report_to, training_args.push_to_hub = [], False
    with scratch_folder(training_args.output_dir) as training_args.output_dir:
        trainer = make_trainer(launch_args, training_args, given)
        report = trainer.trial()
        trainer.accelerator.print(f"\n{report}")
    trainer.accelerator.end_training()
    return 0 if report.fits else MISFIT


def make_trainer(launch_args: LaunchArguments, training_args: DAPOConfig, given: dict[str, Any]) -> "DAPOTrainer":
    """Makes the trainer from what is `given` to it; a mistake of the user's is a `SetupError`."""
    from ..run.preflight import SetupError
    from ..run.terminal import wrapped_for
    from ..trainer import DAPOTrainer

    if PartialState().is_main_process:
        print(wrapped_for(sys.stdout, training_args.batch_arithmetic))
        print(f"Loading {given['model'] if not launch_args.tiny_model else 'a tiny model'}.", flush=True)
    if launch_args.tiny_model:
        given["model"] = tiny_model(training_args)
    try:
        return DAPOTrainer(**given)
    except MISTAKES as error:
        raise SetupError(str(error)) from error


class _Handed(Exception):
    """The arguments that TRL's script passes to its trainer."""


def trainer_arguments(
    launch_args: LaunchArguments, training_args: DAPOConfig, model_args: ModelConfig
) -> dict[str, Any]:
    """
    Return a trainer's arguments: those that `trl grpo` makes of the settings, with this package's problems and tools.
    """

    def hand(**given: Any) -> NoReturn:
        raise _Handed(given)

    asked = launch_args.dataset_name
    script_args = replace(launch_args, reward_funcs=[_as_trl_finds_it(name) for name in _reward_names(launch_args)])
    problems = load_datasets(launch_args, training_args) if reads_problems(launch_args) else None
    loaded = patched(datasets, load_dataset=lambda *_, **__: defaultdict(lambda: None)) if problems else nullcontext()
    given: dict[str, Any] = {}
    try:
        with patched(trl, GRPOTrainer=hand), loaded, data.naming_missing_data(None if problems else asked):
            grpo.main(script_args, training_args, model_args, script_args)
    except _Handed as handed:
        (given,) = handed.args
    except KeyError as error:
        split = error.args[0]
        if split not in (launch_args.dataset_train_split, launch_args.dataset_test_split):
            raise
        raise ValueError(f"The dataset has no split {split!r}.") from None
    if problems:
        given["train_dataset"], given["eval_dataset"] = problems
    if training_args.eval_on_start and given["eval_dataset"] is None:
        raise ValueError("`eval_on_start=True` needs a dataset to evaluate on. Set `eval_strategy`, or leave it out.")
    given["tools"] = [load_function("tools", name, TOOLS) for name in launch_args.tools or []] or None
    return given


def _reward_names(launch_args: LaunchArguments) -> list[str]:
    names = launch_args.reward_funcs or ([] if launch_args.reward_model_name_or_path else ["dapo_math"])
    return [str(name) for name in names]


def _load_reward(name: str) -> Any:
    if "." not in name and hasattr(trl.rewards, name):
        return getattr(trl.rewards, name)
    return load_function("reward_funcs", name, REWARD_FUNCS)


def _reward_funcs(launch_args: LaunchArguments) -> list[Any]:
    """The reward functions, and the name of a reward model."""
    model = launch_args.reward_model_name_or_path
    return [_load_reward(name) for name in _reward_names(launch_args)] + ([model] if model else [])


def _as_trl_finds_it(name: str) -> str:
    """A reward function's name as TRL's script takes it: one of its own, or a path that is known to lead to one."""
    function = _load_reward(name)
    return f"{function.__module__}.{function.__name__}" if name in REWARD_FUNCS else name


def reads_problems(launch_args: LaunchArguments) -> bool:
    """Return whether this package reads the data instead of TRL's script: files, and math problems on the Hub."""
    defaults = {each.name: each.default for each in fields(launch_args)}
    said = [name for name in OF_PROBLEMS if getattr(launch_args, name) != defaults[name]]
    if data.is_file_name(launch_args.dataset_name or ""):
        said.append("dataset_name")
        refuse_what_files_have_not(launch_args)
    others = [name for name in OF_ROWS if getattr(launch_args, name)]
    if said and others:
        raise ValueError(
            f"`{others[0]}` is for rows that are used unchanged, and `{said[0]}={getattr(launch_args, said[0])!r}` "
            "for problems that this package reads. Leave out one of them."
        )
    rewards = [] if others else _reward_funcs(launch_args)
    if not launch_args.dataset_name:
        return False
    if said:
        return True
    return bool(rewards) and read_math_problems(rewards)


def refuse_what_files_have_not(launch_args: LaunchArguments) -> None:
    """Refuse a split or a configuration of a local file, which has neither."""
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
    """The prompts of training, and those of evaluations: another dataset's, or on the Hub another split's."""
    eval_name, eval_split = launch_args.eval_dataset_name, launch_args.eval_dataset_split
    is_file = data.is_file_name(launch_args.dataset_name or "")
    for name, off in (("eval_strategy", "no"), ("eval_on_start", False)):
        value = getattr(training_args, name)
        if eval_name is None and value != off and is_file:
            value = getattr(value, "value", value)  # of an enumeration
            raise ValueError(f"`{name}={value!r}` needs `eval_dataset_name`. Name one, or set `{name}: {off!r}`.")
    if eval_name is None and not is_file and training_args.eval_strategy != "no":
        eval_name, eval_split = launch_args.dataset_name, launch_args.dataset_test_split
    train_dataset = _load_dataset(launch_args, "", launch_args.dataset_name, launch_args.dataset_train_split)
    if eval_name is None:
        return train_dataset, None
    eval_dataset = _load_dataset(launch_args, "eval_", eval_name, eval_split)
    data.refuse_overlap(train_dataset, eval_dataset)
    return train_dataset, eval_dataset


def _load_dataset(args: LaunchArguments, prefix: str, name: str | None, split: str) -> datasets.Dataset:
    assert name is not None  # by `reads_problems`
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
    """The checkpoint that `resume_from_checkpoint` asks for: a path, or `true` for the last complete one."""
    asked = training_args.resume_from_checkpoint
    if asked is None or str(asked).lower() == "false":
        return None
    if str(asked).lower() != "true":
        if not Path(asked, "trainer_state.json").exists():
            raise FileNotFoundError(f"`resume_from_checkpoint={asked}` is not a complete checkpoint.")
        return asked
    return find_checkpoint(output_folder(training_args))


def tiny_model(training_args: DAPOConfig) -> str:
    """The path of a random model of about 0.1 M parameters, made in `output_dir/tiny_model`."""
    from . import tiny

    path = Path(output_folder(training_args)) / "tiny_model"
    with PartialState().local_main_process_first():
        if not (path / "config.json").exists():
            tokenizer = tiny.build_tiny_tokenizer()
            tiny.save(tiny.build_tiny_model(tokenizer, training_args.seed), tokenizer, path)
    return str(path)
