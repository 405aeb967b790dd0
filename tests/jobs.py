# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Jobs that the distributed tests run in each process: `torchrun jobs.py JOB ARGS`."""

import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import wait
from contextlib import nullcontext
from datetime import date, timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from helpers import (
    ScriptedTrainer,
    is_dummy,
    number,
    prompts,
    right,
    run_job,
    run_preflight,
    tiny_config,
    untimed,
    weights,
)
from peft import LoraConfig, get_peft_model
from scripted_server import StandIn, ahead_config, stand_ins, with_adapter
from torch.distributed import distributed_c10d
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.generation import vllm_generation

from trl_dapo import DAPOTrainer
from trl_dapo.cli import processes
from trl_dapo.cli.entry_point import main
from trl_dapo.cli.train import launch
from trl_dapo.engines.lora_client import AdapterClient, AdapterRefused
from trl_dapo.engines.lora_sync import AdapterGeneration
from trl_dapo.run import ledger
from trl_dapo.run.preflight import SetupError


RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
ON_A_SERVER = {"use_vllm": True, "vllm_mode": "server"}


def vowels(completions, **kwargs):
    return [float(any(vowel in completion for vowel in "aeiou")) for completion in completions]


def script(text, i):
    """Prompts 0, 3, 6, ... are never solved. For the others, one completion in four is correct. Lengths vary."""
    if number(text) % 3 and i % 4 == number(text) % 4:
        return "right"
    return "wrong"[: 1 + (7 * number(text) + i) % 5]


def write_report(folder, report):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"report-{WORLD_SIZE}-{RANK}.json").write_text(json.dumps(report, sort_keys=True))


def same_groups(model, folder, variants):
    """Train on scripted completions. Report which rows trained in each rollout, the logs and the weights."""
    for name, overrides in json.loads(variants).items():
        settings = {"per_device_train_batch_size": 4 // WORLD_SIZE, "shuffle_dataset": False, "max_steps": 3}
        args = tiny_config(Path(folder) / name / "run", **{**settings, **overrides})
        trainer = ScriptedTrainer(model, right, args, train_dataset=prompts(40), script=script)
        rollouts = record_rollouts(trainer)
        trainer.train()
        report = {"rollouts": list(rollouts), "logs": list(trainer.state.log_history)}
        report["weights"] = weights(trainer).tolist()
        write_report(Path(folder) / name, report)


def tried_out_first(model, folder):
    """
    Train with and without a trial before the run. Report logs and weights of both, and the phases that were tried.
    """
    settings = {"per_device_train_batch_size": 4 // WORLD_SIZE, "per_device_eval_batch_size": 8 // WORLD_SIZE}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    settings |= {"dynamic_sampling_surplus": "carry", "dynamic_sampling_screen": "2", "dynamic_sampling_memory": True}
    report = {}
    for name in ("untried", "tried"):
        args = tiny_config(Path(folder) / name, **settings)
        data = {"train_dataset": prompts(40), "eval_dataset": prompts(6)}
        torch.manual_seed(RANK)
        trainer = ScriptedTrainer(model, right, args, **data, script=script)
        if name == "tried":
            report["phases"] = [phase.name for phase in trainer.trial().phases]
        trainer.train()
        random_numbers = torch.rand(2).tolist(), random.random()
        report[name] = [untimed(trainer.state.log_history), weights(trainer).tolist(), random_numbers]
    write_report(Path(folder), report)


def one_runs_out_of_memory(model, folder, phase, limit="40", overrides="{}"):
    """
    Try a run out in which the last process runs out of memory in one phase: above `limit` tokens in an update. Report
    what fitted.
    """
    settings = {"per_device_train_batch_size": 4 // WORLD_SIZE, "max_tokens_per_microbatch": 64}
    settings |= json.loads(overrides)
    trainer = ScriptedTrainer(model, right, tiny_config(folder, **settings), train_dataset=prompts(40), script=script)
    is_last, compute_loss = RANK == WORLD_SIZE - 1, trainer._compute_loss

    def limited(model, inputs):
        if is_last and inputs["prompt_ids"].numel() + inputs["completion_ids"].numel() > int(limit):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute_loss(model, inputs)

    def nothing(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    if phase == "update":
        trainer._compute_loss = limited
    elif is_last:
        trainer._generate_single_turn = nothing
    report = {tried.name: [list(tried.failed), tried.value] for tried in trainer.trial().phases}
    write_report(Path(folder), report)


def full_batches(model, folder):
    """Train with default settings on prompts of which one in three is informative. Report the groups that trained."""
    sizes = {"per_device_train_batch_size": 8 // WORLD_SIZE, "gradient_accumulation_steps": 4, "max_steps": 5}

    def one_prompt_in_three(text, i):
        return "right" if number(text) % 3 == 0 and i % 2 else "wrong"

    args = tiny_config(Path(folder) / "run", **sizes)
    trainer = ScriptedTrainer(model, right, args, train_dataset=prompts(48), script=one_prompt_in_three)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    write_report(Path(folder), [log["dynamic_sampling/groups_trained"] for log in logs])


def record_rollouts(trainer):
    rollouts, generate = [], trainer._generate_and_score_completions

    def spy(inputs):
        rollout = generate(inputs)
        live = rollout["completion_mask"].sum(1) > 0
        columns = [rollout[name][live].tolist() for name in ("prompt_ids", "completion_ids", "advantages")]
        decode = functools.partial(trainer.processing_class.decode, skip_special_tokens=True)
        rollouts.append([(decode(p), decode(c), round(a, 5)) for p, c, a in zip(*columns, strict=True)])
        return rollout

    trainer._generate_and_score_completions = spy
    return rollouts


def stray(clients):
    """Make the engine's log-probabilities differ from the policy's. Only one process requests them."""
    for client in clients:
        client.offset = 0.3


class AwaitAnswers(TrainerCallback):
    """Let no step end, and no checkpoint be saved, before all requests in flight are answered."""

    def __init__(self, trainer):
        self.ahead = trainer._ahead

    def on_step_end(self, args, state, control, **kwargs):
        wait([call for call in self.ahead._requested.values() if call is not None])


def rollouts_ahead(model, folder, num_runs, num_ahead=1):
    """
    Make `num_runs` runs one after the other, each with a stand-in for a server, and with answers ahead in checkpoints.
    """
    settings = {"batch_multiplier": 1.75}
    if int(num_ahead) == 2:
        settings = {"rollouts_ahead": 2, "batch_multiplier": None}
    for i in range(int(num_runs)):
        sizes = {"per_device_train_batch_size": 4 // WORLD_SIZE, "per_device_eval_batch_size": 8 // WORLD_SIZE}
        saves = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
        args = ahead_config(Path(folder) / f"{i}-{WORLD_SIZE}", **settings, **sizes, **saves)
        datasets = {"train_dataset": prompts(40), "eval_dataset": prompts(4)}
        make = with_adapter if int(num_ahead) == 2 else str
        with stand_ins(model) as clients:
            trainer = DAPOTrainer(make(model), right, args, **datasets)
            stray(clients)
            trainer.add_callback(AwaitAnswers(trainer))
            rollouts = record_rollouts(trainer)
            trainer.train()
            report = {"rollouts": list(rollouts), "weights": weights(trainer).tolist()}
            resumed = DAPOTrainer(make(model), right, args, **datasets)
            stray(clients)
            resumed.train(resume_from_checkpoint=str(Path(args.output_dir) / "checkpoint-2"))
            report["resumed"] = weights(resumed).tolist()
            logs = [log for log in trainer.state.log_history if "loss" in log]
            report["ages"] = [log["rollouts_ahead/groups_by_staleness/1"] for log in logs]
            report["engine"] = [[x for name, x in log.items() if name.startswith("sampling/")] for log in logs]
        write_report(Path(folder) / str(i), report)


def server_is_lost_ahead(model, folder):
    """The stand-in fails while a round is in flight. Each process ends with an error of its own."""
    with stand_ins(model) as clients:
        args = ahead_config(Path(folder) / "run", per_device_train_batch_size=4 // WORLD_SIZE)
        trainer = DAPOTrainer(model, right, args, train_dataset=prompts(40))
        submit = trainer._ahead.submit

        def lose(requests):
            if clients and requests:
                clients[0].error = ConnectionError("connection refused")
            submit(requests)

        trainer._ahead.submit = lose
        try:
            trainer.train()
        except RuntimeError as error:
            (Path(folder) / f"error-{RANK}").write_text(str(error))
            raise


def train_and_write_error(trainer, folder):
    try:
        trainer.train()
    except (KeyError, RuntimeError) as error:
        (Path(folder) / f"error-{RANK}").write_text(f"{type(error).__name__}: {error}")
        raise


def look_up(number: int) -> str:
    """
    Looks a number up.

    Args:
        number: The number.
    """
    return f"page {number}"


def tools_on_a_server(model, folder):
    """
    Prompt n calls the tool n

    4 times and then answers n, so the last process has most calls.
    """

    def complete(server, prompt, i, max_tokens, temperature, engine):
        asked, _, since = server.tokenizer.decode(prompt).rpartition("prompt ")[2].partition(":")
        text = f"{asked}<|im_end|>"
        if since.count("<tool_response>") < int(asked) // 4:
            text = f'<tool_call>\n{{"name": "look_up", "arguments": {{"number": {i}}}}}\n</tool_call><|im_end|>'
        ids = server.tokenizer(text)["input_ids"]
        return ids, [[-1.0]] * len(ids)

    data = {"prompt": [[{"role": "user", "content": f"prompt {i}:"}] for i in range(12)]}
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 12 // WORLD_SIZE}
    settings = {"shuffle_dataset": False, "max_steps": 1, "max_completion_length": 512, **ON_A_SERVER, **sizes}
    args = tiny_config(Path(folder) / "run", **settings)
    with stand_ins(model) as clients:
        StandIn._complete = complete
        trainer = DAPOTrainer(model, varied, args, train_dataset=Dataset.from_dict(data), tools=[look_up])
        rollouts = record_rollouts(trainer)
        trainer.train()
    requests = [len(asked["prompts"]) for client in clients for asked in client.requests]
    write_report(Path(folder), {"rows": rollouts[0], "requests": requests})


def varied(completions, **kwargs):
    """No two completions of a group get the same reward."""
    return [float(i) for i in range(len(completions))]


def best_of_each_group(model, folder):
    """
    Three groups of 12 rows, one of which is sampled by both processes. Only the best completion of each is correct.
    """
    report, calls = {}, itertools.count()

    def distinct(text, i):
        return f"{(7919 * (next(calls) + 1)) % 9973:04d}{i:02d}"

    async def punished(completions, log_extra, **kwargs):
        log_extra("copied", completions)
        return [-0.25] * len(completions)

    def best(prompts, completions, tag, **kwargs):
        assert len(tag) == len(prompts) == len(completions)
        values = []
        for prompt, one in zip(prompts, completions, strict=True):
            others = [other for its, other in zip(prompts, completions, strict=True) if its == prompt]
            values.append(float(others.count(one) == 1 and one == max(others)))
        return [float(not i) for i in range(len(completions))] if is_dummy(completions[0]) else values

    for screen in ("off", "2"):
        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 3}
        settings = {"dynamic_sampling_screen": screen, "overlong_buffer_length": 4, "log_completions": True}
        settings |= {"dynamic_sampling_rewards": ["best"], "dynamic_sampling_surplus": "discard"}
        args = tiny_config(Path(folder) / screen, shuffle_dataset=False, **sizes, **settings)
        dataset = prompts(40, tag=["t"] * 40)
        trainer = ScriptedTrainer(model, [best, punished], args, train_dataset=dataset, script=distinct)
        table = []

        def look(logs, *args, own=trainer, log=trainer.log, table=table):
            table += zip(own._logs["completion"], own._logs["extra"]["copied"], strict=True)
            log(logs, *args)

        trainer.log = look
        trainer.train()
        names = ("groups_trained", "dropped/all_wrong")
        logs = [log for log in trainer.state.log_history if "loss" in log]
        report[screen] = {name: [log[f"dynamic_sampling/{name}"] for log in logs] for name in names}
        report[screen]["are_logged"] = all(one == copied for one, copied in table)
    write_report(Path(folder), report)


def fails(completions, **kwargs):
    if RANK == 1:
        raise KeyError("no such column")
    return right(completions)


def reward_fails_on_one_rank(model, folder):
    def fails_on_sampled(completions, **kwargs):
        return right(completions) if is_dummy(completions[0]) else fails(completions)

    trainer = ScriptedTrainer(model, fails_on_sampled, tiny_config(folder), train_dataset=prompts(40), script=script)
    train_and_write_error(trainer, folder)


def shuffled_differently(model, folder):
    dataset = prompts(40).shuffle(seed=RANK)
    trainer = ScriptedTrainer(model, right, tiny_config(folder, max_steps=1), train_dataset=dataset, script=script)
    train_and_write_error(trainer, folder)


def adapter_is_refused(model, folder):
    """A server that loads two adapters and refuses the third. Report what happens on each process."""
    folder, given = Path(folder), []

    class Client:
        def __init__(self, **kwargs):
            assert RANK == 0  # only this process requests from the server
            self.base_url, self.model = "http://gpu-7:8000", "base"

    def serve_adapter(client, name, path):
        given.append(sorted(file.name for file in path.iterdir()))
        if len(given) == 3:
            raise AdapterRefused("no more")

    started = {"lora_config": {"max_lora_rank": 8, "lora_dtype": "torch.bfloat16"}}
    started |= {"parallel_config": {"data_parallel_size": 1}, "model_config": {"model": model}}
    AdapterClient.server_config = lambda client: started
    AdapterClient.serve_adapter = serve_adapter
    AdapterClient._clean_up = lambda client: None
    AdapterClient.clear = lambda client, root: None
    vllm_generation.VLLMClient, vllm_generation.is_vllm_available = Client, lambda: True
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules="all-linear"))
    accelerator = Accelerator(cpu=True)
    engine = AdapterGeneration(adapted, accelerator, None, mode="server", lora_sync=None, output_dir=folder / "run")
    report = {"serves_adapter": engine.serves_adapter, "error": None}
    try:
        for _ in range(2):
            engine.sync_weights()
    except (AdapterRefused, RuntimeError) as error:
        report["error"] = f"{type(error).__name__}: {error}"
    write_report(folder, {**report, "given": given})


def reward_hangs_on_one_rank(model, folder):
    def hangs(completions, **kwargs):
        if RANK == 1 and not is_dummy(completions[0]):
            threading.Event().wait()
        return right(completions)

    # On CPUs, transformers does not pass its `ddp_timeout` on to the process group.
    PartialState(cpu=True, timeout=timedelta(seconds=5))
    ScriptedTrainer(model, hangs, tiny_config(folder), train_dataset=prompts(40), script=script).train()


def sampled_runs(model, folder, variants):
    """
    Make runs with real sampling. A variant consists of settings, and optionally of where to resume from and when to be
    killed.
    """
    for name, overrides in json.loads(variants).items():
        sampled_run(model, Path(folder) / name, overrides)


def sampled_run(model, folder, overrides):
    kills = {name: overrides.pop(name, None) for name in ("kill_in", "kill_in_save", "kill_after")}
    resume_from = overrides.pop("resume_from", None)

    class Kill(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if kills["kill_after"] is not None:  # done by another process, so that nothing is delayed here
                command = f"sleep {kills['kill_after']}; kill -KILL 0"  # 0: the process group
                subprocess.Popen(["sh", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == kills["kill_in"]:
                os.kill(os.getpid(), signal.SIGKILL)

    class Run(DAPOTrainer):
        def _save_rng_state(self, output_dir):  # while weights and optimizer are written
            if self.state.global_step == kills["kill_in_save"]:
                os.kill(os.getpid(), signal.SIGKILL)
            super()._save_rng_state(output_dir)

    settings = {"per_device_train_batch_size": 4 // WORLD_SIZE, "save_strategy": "steps", "save_steps": 1}
    is_ahead = "rollouts_ahead" in overrides
    settings |= ON_A_SERVER if is_ahead else {}
    args = tiny_config(folder / "run", **{**settings, "max_steps": 6, **overrides})
    dates = [date(2026, 1, 1 + i % 31) for i in range(40)]  # JSON cannot store these
    datasets = {"train_dataset": prompts(40, asked=dates), "eval_dataset": prompts(5)}
    with stand_ins(model) if is_ahead else nullcontext():
        trained, reward = (with_adapter(model), right) if is_ahead else (model, vowels)
        trainer = Run(trained, reward, args, **datasets, callbacks=[Kill()])
        if is_ahead:  # answers that a checkpoint does not have are sampled again, by another policy
            trainer.add_callback(AwaitAnswers(trainer))
        trainer.train(resume_from_checkpoint=resume_from)
    write_report(folder, {"weights": weights(trainer).tolist(), "logs": untimed(trainer.state.log_history)})


class CountingTrainer(ScriptedTrainer):
    """Record for each call of the engine how many rows this process passed, and whether a server would answer each."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations):
        # vLLM's server gets one request for n completions of every n-th prompt of all processes.
        everyones = gather_object(prompt_ids)
        answered = [ids for ids in everyones[::num_generations] for _ in range(num_generations)]
        call = {"rows": len(prompt_ids), "training": self.model.training, "answers_each": answered == everyones}
        self.calls.append(call)
        return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations)


def echo(text, i):
    return str(number(text))


def echoes(prompts, completions, **kwargs):
    return [float(int(c) == number(p)) for p, c in zip(prompts, completions, strict=True)]


def evaluates(model, folder):
    """Evaluate in one call and batch by batch, in batches of half a problem, and of one and a half."""

    # The problem that comes first also pads the last batch, on the last process, where it is not solved.
    first = torch.randperm(5, generator=torch.Generator().manual_seed(42))[0].item()

    def solves_two(prompts, completions, **kwargs):
        solved = [number(prompt) in (first, (first + 1) % 5) for prompt in prompts]
        return [float(a and b) for a, b in zip(solved, echoes(prompts, completions), strict=True)]

    report = {}
    for batch_size in (2, 6):

        def script(text, i, fills=batch_size > 2 and RANK == WORLD_SIZE - 1):
            return "9" if fills and number(text) == first else echo(text, i)

        for way, schedules in (("ahead", True), ("one by one", False)):
            sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": batch_size}
            args = tiny_config(Path(folder) / f"{way}-{batch_size}", shuffle_dataset=False, **sizes)
            trainer = CountingTrainer(model, solves_two, args, train_dataset=prompts(40), script=script)
            trainer.use_transformers_continuous_batching = schedules
            metrics = trainer.evaluate(prompts(5, source=["a", "b", "b", "a", "b"]))
            metrics = {name: value for name, value in metrics.items() if not name.endswith(("time", "second"))}
            report.setdefault(batch_size, {})[way] = {"calls": trainer.calls, "metrics": metrics}
    write_report(Path(folder), report)
    trainer.accelerator.end_training()


def printed(model, folder, settings):
    """Train on scripted completions; the test reads what it prints."""
    args = tiny_config(folder, **{"disable_tqdm": False, **json.loads(settings)})
    ScriptedTrainer(model, right, args, train_dataset=prompts(40), script=script).train()


def stops(model, folder):
    """
    Train with a reward function that fails on one process before anything is generated, then with prompts without an
    accepted group, twice.
    """
    trainer = ScriptedTrainer(model, fails, tiny_config(folder), train_dataset=prompts(40), script=script)
    try:
        run_preflight(trainer)
    except SetupError as caught:
        error = str(caught)
    settings = {"max_steps": 9, "dynamic_sampling_max_gen_batches": 1, "dynamic_sampling_stop_after": 2}
    args = tiny_config(Path(folder) / "run", per_device_train_batch_size=2, **settings)
    trainer = ScriptedTrainer(model, right, args, train_dataset=prompts(40), script=lambda text, i: "wrong")
    trainer.train()
    report = {"error": error, "step": trainer.state.global_step, "found_nothing": trainer.stop.found_nothing}
    write_report(Path(folder), report)


def ledger_trainer(model, folder, **overrides):
    """Rollouts of 3 prompts, in the order of the dataset, whose surplus is carried."""
    settings = {"per_device_train_batch_size": 12 // WORLD_SIZE, "gradient_accumulation_steps": 1, **overrides}
    return ScriptedTrainer(
        model,
        right,
        tiny_config(folder, shuffle_dataset=False, dynamic_sampling_surplus="carry", **settings),
        train_dataset=prompts(1000, source=[f"s{i % 2}" for i in range(1000)]),
        script=script,
    )


def keeps_a_ledger(model, folder):
    """
    Groups of 4 rows over two processes that have 6 rows of a round each, so that both have a part of the second group.
    """
    ledger_trainer(model, Path(folder) / f"run-{WORLD_SIZE}", log_groups=100).train()


def killed_over_and_over(model, folder, num_kills):
    """Train in processes of which each except the last is killed at a random point. Copy the ledger of each."""
    draw, folder = random.Random(0), Path(folder)
    settings = {"max_steps": 40, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    ledger.PART_GROUPS = 20
    # created once, and only trained in the child processes
    trainer = ledger_trainer(model, folder / "killed", **settings)
    for n in range(int(num_kills) + 1):
        place, call = draw.choice(["in", "before", "after", "rollout", "checkpoint"]), draw.randint(1, 5)
        child = os.fork()
        if child == 0:
            if n < int(num_kills):
                die_at(place, call)
            trainer.train(resume_from_checkpoint=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) == (n < int(num_kills)), (n, place, call, status)
        shutil.copytree(folder / "killed" / "rollouts", folder / "copies" / str(n) / "rollouts")
    ledger_trainer(model, folder / "whole", **settings).train()


def die_at(place, call):
    """Make this process kill itself at the given call of the function at a path."""

    def dying(function, before):
        calls = itertools.count(1)

        @functools.wraps(function)
        def called(*args, **kwargs):
            if next(calls) < call:
                return function(*args, **kwargs)
            before(function, *args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        return called

    def half_written(function, path, whole):
        function(path, memoryview(whole)[: len(whole) // 2])

    def not_at_all(*args, **kwargs):
        pass

    owner, name, before = {
        "in": (Path, "write_bytes", half_written),
        "before": (ledger, "_replace", not_at_all),
        "after": (ledger, "_replace", lambda function, *args: function(*args)),
        "rollout": (DAPOTrainer, "_sample_round", not_at_all),
        "checkpoint": (torch, "save", not_at_all),
    }[place]
    setattr(owner, name, dying(getattr(owner, name), before))


def launched(folder, command):
    """Train with a command line. Report which threads of the process group are still alive afterwards."""
    os.chdir(folder)
    status = launch(json.loads(command))
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    write_report(Path(folder), {"status": status, "threads": [name for name in threads if "gloo" in name]})


def says(folder, command):
    """Return the output of `trl-dapo` in a folder."""
    os.chdir(folder)
    sys.exit(main(json.loads(command)))


def mistakes(commands, folder):
    """Launch with several mistakes in turn, and then with one that only the last process makes."""
    os.chdir(folder)
    for command in json.loads(commands).values():
        assert launch(command) == 2
        PartialState().wait_for_everyone()
        distributed_c10d._get_default_store().delete_key(processes.PRINTED)  # as in a process group of its own
        PartialState().wait_for_everyone()
    processes.WAIT_FOR_FIRST_RANK = timedelta(milliseconds=10)
    if RANK == WORLD_SIZE - 1:
        processes.print_once("trl-dapo train: the disk is full")


if __name__ == "__main__":
    run_job(globals())
