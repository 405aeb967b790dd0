# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A recipe as a plan reads it: every field with its default, the header, the GPUs, and how training is sharded."""

import ast
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any

import yaml

from ..settings.arguments import _read_recipe, refuse_unknown_fields
from ..settings.ranges import COUNT, TRUTH, check_choice, check_value, check_values, read_choice
from ..settings.recipe_files import find_accelerate_config, find_recipe
from ..settings.rules import check_rules, why_punished_twice
from ..settings.sampling_defaults import SamplingChoice, normalize, why_not_screened
from ..trl_names import PARSED


# The dataclasses that a recipe fills in, the most general first: package, file and name.
DATACLASSES = (*PARSED, ("trl_dapo", "config.py", "DAPOConfig"), ("trl_dapo", "cli/train.py", "LaunchArguments"))
# Configurations of accelerate that come with the package, by the word in the header's `Hardware:`.
CONFIGS_BY_WORD = {"FSDP2": "fsdp2", "ZeRO-2": "zero2", "ZeRO-3": "zero3", "DDP": "multi_gpu"}
# Fields that a plan ignores: variables that TRL's parser sets, and how processes are launched.
IGNORED = "env num_processes num_machines machine_rank main_process_ip main_process_port multi_gpu gpu_ids".split()
IGNORED += ["same_network", "rdzv_backend", "rdzv_conf", "mixed_precision"]
KINDS = {"bool": "true or false", "float": "a number", "int": "a number", "list": "a list", "dict": "a mapping"}
KINDS["str"] = "a text"
DTYPES = ("auto", "bfloat16", "float16", "float32", None)
LONGEST_PROMPT = 2048  # tokens, if the data is not on this machine
CHARACTERS_PER_TOKEN = 4  # of text; the tokenizer of `tiny_model` has a token for each byte
TEMPLATE = 32  # tokens of a chat template around a prompt
OPTIONS = ("config", "gpus", "accelerate_config")  # of `trl-dapo plan` itself
GPUS_PER_MACHINE = 8
OWN = "For another GPU write its memory and a name: 2x48GB:A6000."


@dataclass(frozen=True)
class GPU:
    """A GPU, or this machine if there is none."""

    name: str  # as in `--gpus`
    memory: float  # bytes, the total that `nvidia-smi` shows


GPUS = {
    name: GPU(name, mebibytes * 2**20)
    for name, mebibytes in (
        ("H100-80GB", 81_559),
        ("H200-141GB", 143_771),
        ("B200-180GB", 183_359),
        ("A100-80GB", 81_920),
        ("A100-40GB", 40_960),
        ("L40S-48GB", 46_068),
        ("L4-24GB", 23_034),
        ("RTX4090-24GB", 24_564),
        ("RTX3090-24GB", 24_576),
    )
}
# The GPU that "GPUs of 80 GB" in a recipe's header stands for, by its size.
TYPICAL = ("RTX4090-24GB", "A100-40GB", "L40S-48GB", "H100-80GB", "H200-141GB", "B200-180GB")
GPU_OF_SIZE = {name.split("-")[1]: GPUS[name] for name in TYPICAL}


def cpu() -> GPU:
    """Return this machine, without a GPU."""
    return GPU("CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a run, all of one kind."""

    gpu: GPU
    num_train: int  # GPUs that train, with one process each
    num_serve: int = 0  # GPUs that serve vLLM and nothing else

    def __str__(self) -> str:
        return f"{self.num_train}{f'+{self.num_serve}' if self.num_serve else ''}x{self.gpu.name}"


def parse_gpus(text: str) -> Cluster:
    """Read `--gpus`: `8xH100-80GB`, or `64+8xH100-80GB` if 64 train and 8 serve vLLM. Raises `ValueError`."""
    match = re.fullmatch(r"(?:(\d+)(?:\+(\d+))?x)?([A-Za-z].*|[\d.]+(?i:GB):.*)", text.strip())
    if match is None or match[1] == "0":
        raise ValueError(
            f"`--gpus {text}` cannot be read. Write 8xH100-80GB, or 64+8xH100-80GB if 64 train and 8 serve. {OWN}"
        )
    num_train, num_serve, name = match.groups()
    known = {known.lower(): gpu for known, gpu in GPUS.items()} | {"cpu": cpu()}
    models = [key.split("-")[0] for key in known]
    known |= {model: gpu for model, gpu in zip(models, list(known.values()), strict=True) if models.count(model) == 1}
    gpu = _read_own(name) if ":" in name else known.get(name.lower())
    if gpu is None:
        raise ValueError(f"`--gpus {text}` names an unknown GPU. Known: {', '.join([*GPUS, 'CPU'])}. {OWN}")
    return Cluster(gpu, int(num_train or 1), int(num_serve or 0))


def _read_own(name: str) -> GPU:
    """Return a GPU that is not on the list, by its memory."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)GB:[^:\s]+", name, re.IGNORECASE)
    gigabytes = float(found[1]) if found else 0.0
    if not gigabytes:
        raise ValueError(f"`--gpus` cannot read the GPU {name}. {OWN}")
    return GPU(name, gigabytes * 2**30)  # makers of GPUs count this way: 24 GB of an RTX 3090 are 24 GiB


def read_hardware(text: str) -> Cluster | None:
    """Read a recipe's `Hardware:`, such as `one GPU of 24 GB`; `None` if it names no GPUs of a known size."""
    if "CPU" in text and "GPU" not in text:
        return Cluster(cpu(), 1)
    number = r"\b(one|two|\d+)"
    found = re.search(rf"{number} GPUs? of (\d+) GB", text)
    if found is None or f"{found[2]}GB" not in GPU_OF_SIZE:
        return None
    counts = [re.search(rf"{number}\b[^,.;:]*\b{verb}\b", text) for verb in ("trains?", "serves?")]
    num_train, num_serve = (
        0 if count is None else {"one": 1, "two": 2}.get(count[1]) or int(count[1])
        for count in (counts[0] or found, counts[1])
    )
    return Cluster(GPU_OF_SIZE[f"{found[2]}GB"], num_train, num_serve) if num_train else None


@dataclass(frozen=True)
class Sharding:
    """The way in which the processes that train share a model."""

    kind: str  # "none", "ddp", "fsdp2", "zero1", "zero2" or "zero3"
    offloads_optimizer: bool = False
    offloads_weights: bool = False

    @property
    def is_deepspeed(self) -> bool:
        return self.kind.startswith("zero")

    @property
    def shards_weights(self) -> bool:
        return self.kind in ("fsdp2", "zero3")


@dataclass(frozen=True)
class Recipe:
    """A recipe as a plan needs it: its settings, how training is sharded, and its GPUs."""

    name: str
    settings: SimpleNamespace  # every field of a recipe, with its default if the recipe does not set it
    sharding: Sharding
    cluster: Cluster
    longest_prompt: int  # tokens

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that the rules need besides the settings, as far as a recipe shows them."""
        s = self.settings
        judge = str(s.reward_model_name_or_path or "").split("/")[-1]
        names = list(s.reward_funcs or [])
        if judge:
            names = [judge, *names]
        elif not names:
            names = ["dapo_math"]
        weighted = zip(names, s.reward_weights or [1.0] * len(names), strict=False)
        deciding = s.dynamic_sampling_rewards or [n for n, w in weighted if w and "overlong_punishment" not in n]
        is_graded = judge in deciding and not s.dynamic_sampling_accuracy_threshold
        why = "needs one reward that says what is correct, and its name in `dynamic_sampling_rewards`."
        is_decided = s.dynamic_sampling_rewards or len(deciding) == 1
        return {
            "has_tools": bool(s.tools),
            "is_quantized": s.load_in_4bit or s.load_in_8bit,
            "why_no_correctness": why if is_graded or not is_decided else None,
        }

    def settle(self, **facts: Any) -> None:
        """Decide how prompts are sampled, and refuse settings that contradict each other, as a run does."""
        facts, on_cpu = self.facts | facts, self.cluster.gpu.name == "CPU"
        SamplingChoice(self.settings, why_not_screened(self.settings, facts["has_tools"], on_cpu), **facts)
        check_rules(self.settings, **facts)

    @property
    def uses_a_server(self) -> bool:
        """Whether a vLLM server samples the completions."""
        return self.settings.use_vllm and self.settings.vllm_mode == "server"


@cache
def _declarations() -> dict[str, ast.AnnAssign]:
    # The files are parsed, because importing the dataclasses takes longer than planning all recipes.
    found: dict[str, ast.AnnAssign] = {}
    for package, file, name in DATACLASSES:
        spec = find_spec(package)
        assert spec is not None
        tree = ast.parse(Path(str(spec.origin)).parent.joinpath(file).read_text(encoding="utf-8"))
        (declared,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        found |= {ast.unparse(node.target): node for node in declared.body if isinstance(node, ast.AnnAssign)}
    return found


@cache
def declared_fields() -> dict:
    """Return every field that a recipe may have, with its default, or with `None` if that is not a literal."""
    return {name: _literal(node.value) for name, node in _declarations().items()}


def read_values(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe converted to their types: YAML reads `1e-6` as text and `no` as false."""
    return {name: read_choice(name, normalize(name, _read_as(name, value))) for name, value in given.items()}


def _read_as(name: str, value: Any) -> Any:
    annotation = ast.unparse(_declarations()[name].annotation)
    types = set(re.findall(r"\w+", re.sub(r"\[.*?\]", "", annotation)))  # without those of a list's elements
    if type(value).__name__.removesuffix("Type") in types:
        return value
    kind = next((kind for kind in KINDS if kind in types), "dict")
    with suppress(KeyError, TypeError, ValueError):
        if kind in ("float", "int"):
            return value if isinstance(value, (int, float)) else {"float": float, "int": int}[kind](value)
        if kind == "bool":
            return TRUTH[str(value).lower()]
    if kind == "list" and not isinstance(value, (dict, NoneType)):
        return [value]
    if kind == "str" and not isinstance(value, (list, dict, NoneType)):
        value = "no" if value is False and "Strategy" in annotation else value
        return value if isinstance(value, bool) else str(value)
    raise ValueError(f"`{name}` must be {KINDS[kind]}, got {value!r}.")


def _literal(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):  # `field(default=...)`
        value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def read(
    path: str, gpus: str | None = None, accelerate_config: str | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """Read a recipe; arguments and errors are those of [`~plan.planning.plan`]."""
    file, values = find_recipe(path), dict(declared_fields())
    fields = {name: value for name, value in _read_recipe(file).items() if name not in IGNORED}
    accelerate_config = accelerate_config or fields.pop("accelerate_config", None) or fields.pop("config_file", None)
    for source, given in ((str(file), fields), (None, _read_overrides(overrides))):
        refuse_unknown_fields(source, given, values, OPTIONS)
        values |= read_values(given)
    settings = SimpleNamespace(**values)
    # Refuse what a run would refuse, and what a plan cannot calculate with.
    check_values(settings)
    check_rules(settings)
    names = [name.rpartition(".")[2].removeprefix("get_") for name in settings.reward_funcs or ()]
    if (message := why_punished_twice(settings.overlong_buffer_length, names, settings.reward_weights)) is not None:
        raise ValueError(message)
    if settings.max_completion_length is None:
        raise ValueError("A plan needs `max_completion_length`, got None. Set it, as in `max_completion_length: 512`.")
    check_value("lora_r", settings.lora_r, COUNT)
    check_choice("dtype", settings.dtype, DTYPES)
    for one, other in (("bf16", "fp16"), ("load_in_4bit", "load_in_8bit")):
        if getattr(settings, one) and getattr(settings, other):
            raise ValueError(f"`{one}` and `{other}` contradict each other.")
    if (settings.load_in_4bit or settings.load_in_8bit) and not settings.use_peft:
        raise ValueError("A quantized model can only train an adapter: set `use_peft: true`.")
    header = read_header(file)
    if gpus is None:
        cluster = read_hardware(header.get("Hardware", "CPU" if settings.use_cpu else ""))
    else:
        cluster = parse_gpus(gpus)
    if cluster is None:
        raise ValueError(
            f"{file} does not name its GPUs in a line such as `# Hardware: 8 GPUs of 80 GB`. Name them on the command "
            "line: `--gpus 8xH100-80GB`."
        )
    sharding = _find_sharding(header, accelerate_config, cluster)
    recipe = Recipe(file.stem, settings, sharding, cluster, _read_longest_prompt(settings))
    if cluster.num_serve and not recipe.uses_a_server:
        raise ValueError(
            f"{cluster} has GPUs that serve vLLM, but the recipe does not use a vLLM server. Leave these GPUs out."
        )
    if recipe.uses_a_server and not cluster.num_serve:
        raise ValueError(
            f"The recipe uses a vLLM server, and {cluster} has no GPU for it. Write both numbers: 64+8xH100-80GB."
        )
    return recipe


def _read_longest_prompt(settings: SimpleNamespace) -> int:
    """Return the tokens of the longest prompt, estimated from its characters if the data is in a file."""
    if Path(str(settings.dataset_name)).suffix:
        from ..data import prompt_lengths  # slow to import, and not needed otherwise

        with suppress(OSError, ValueError):  # the run itself will say what is the matter with the file
            _, most = prompt_lengths(settings.dataset_name, settings.prompt_style, settings.dataset_limit)
            per_token = 1 if settings.tiny_model else CHARACTERS_PER_TOKEN
            return math.ceil(most / per_token + TEMPLATE)
    return LONGEST_PROMPT


def read_header(path: str | Path) -> dict[str, str]:
    """Return the fields of a recipe's leading comment, such as `Hardware`, with the lines of each joined."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    comment = "\n".join(takewhile(lambda line: line.startswith("#"), lines))
    fields = re.split(r"^# ([A-Z][a-z ]+): +", comment, flags=re.MULTILINE)[1:]
    return {name: re.sub(r"\n# *", " ", text) for name, text in zip(fields[::2], fields[1::2], strict=True)}


def _read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return `--field value ...` as a recipe would have it: no value is `true`, several values are a list."""
    if any(word.startswith(("--num_processes", "--num-processes")) for word in overrides):
        raise ValueError(
            "`trl-dapo plan` takes the number of processes from the GPUs. Instead of `--num_processes` write, for "
            "example, `--gpus 4xH100-80GB`."
        )
    given, name = {}, None
    for word in overrides:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            given[name] = [_read_value(value)] if equals else []
        elif name is None:
            raise ValueError(f"`{word}` follows no `--field`. Write `--field {word}`, with the name of a field.")
        else:
            given[name].append(_read_value(word))
    return {name: values[0] if len(values) == 1 else values or True for name, values in given.items()}


def _read_value(text: str) -> Any:
    with suppress(yaml.YAMLError):
        return yaml.safe_load(text)
    return text  # not YAML, for example a path that begins with a bracket


def _find_sharding(header: dict[str, str], accelerate_config: str | None, cluster: Cluster) -> Sharding:
    """Find the sharding: by the option, otherwise by the header's `Launch:`, otherwise by the header's `Hardware:`."""
    launched = re.search(r"--accelerate_config (\w+)|accelerate/(\w+)\.yaml", header.get("Launch", ""))
    said = [file for word, file in CONFIGS_BY_WORD.items() if word in header.get("Hardware", "")]
    name = accelerate_config
    if not name and launched:
        name = launched[1] or launched[2]
    if not name:
        name = next(iter(said), None)
    if name is None:
        return Sharding("ddp" if cluster.num_train > 1 else "none")
    return read_sharding(find_accelerate_config(name), cluster.num_train)


def read_sharding(file: Path, num_processes: int) -> Sharding:
    """Read a configuration of accelerate's. Raises `ValueError` if a plan does not know its sharding."""
    config = _read_recipe(file)
    kind = str(config.get("distributed_type", "NO")).upper()
    fsdp, deepspeed = config.get("fsdp_config") or {}, config.get("deepspeed_config") or {}
    if kind == "FSDP":
        if fsdp.get("fsdp_version", 1) != 2 or not fsdp.get("fsdp_reshard_after_forward", True):
            raise ValueError(f"{file}: of FSDP, a plan knows only FSDP2 with resharding after forward, got {fsdp}.")
        offloads = bool(fsdp.get("fsdp_offload_params"))
        return Sharding("fsdp2", offloads, offloads)
    if kind == "DEEPSPEED":
        if "deepspeed_config_file" in deepspeed or deepspeed.get("zero_stage", 2) not in (1, 2, 3):
            raise ValueError(
                f"{file}: of DeepSpeed, a plan knows only `zero_stage` 1 to 3, set in accelerate's own configuration, "
                f"got {deepspeed}."
            )
        offloads_optimizer = deepspeed.get("offload_optimizer_device", "none") != "none"
        offloads_weights = deepspeed.get("offload_param_device", "none") != "none"
        return Sharding(f"zero{deepspeed.get('zero_stage', 2)}", offloads_optimizer, offloads_weights)
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise ValueError(f"{file}: a plan does not know `distributed_type: {kind}`.")
    return Sharding("ddp" if num_processes > 1 else "none")
