# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import logging
import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from trl.rewards import accuracy_reward

import trl_dapo
from trl_dapo.rewards import MathVerifyReward, math_verify_reward, math_worker


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers need POSIX signals")
linux_only = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux's pidfd_open and /proc")

ENDLESS = r"\boxed{9^{9^{9^{9}}}}"
MIB = 1 << 20


@pytest.fixture(scope="module")
def rewards():
    """Pools with limits that no honest completion hits, however busy the machine is, and with some that are hit."""
    impatient = MathVerifyReward(timeout=1.0, num_workers=2, memory_limit=512 * MIB)
    yield (made := {"patient": MathVerifyReward(timeout=60.0, num_workers=2), "impatient": impatient})
    for reward in made.values():
        reward.close()


@pytest.fixture
def pool():
    """Makes rewards with pools of their own, which end with the test."""
    made = []
    yield lambda **settings: made.append(MathVerifyReward(**settings)) or made[-1]
    for reward in made:
        reward.close()


@pytest.fixture
def light(tmp_path, monkeypatch):
    """A replacement of math-verify that reads digits. Importing math-verify itself takes seconds."""
    (folder := tmp_path / "light").mkdir()
    (folder / "math_verify.py").write_text(
        textwrap.dedent("""
        import re, sys
        sys.modules["latex2sympy2_extended"] = sys.modules["math_verify"]
        LatexExtractionConfig = NormalizationConfig = dict

        def parse(text, **settings):
            return [9**9**9**9] if "9^" in text else re.findall("[0-9]+", text)

        def verify(golds, answers, **settings):
            return [*map(int, golds)] == [*map(int, answers)]
    """)
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def pids(reward):
    return [worker.process.pid for worker in reward._workers]


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Runs `script` in every worker as it starts, with a `once(name)` that is true the first time that any asks."""

    def scripted(script):
        (tmp_path / "math_verify.py").write_text(
            textwrap.dedent(f"""
                import os, signal, sys, time

                def once(name):
                    try:
                        os.close(os.open(os.path.join({str(tmp_path)!r}, name), os.O_CREAT | os.O_EXCL))
                    except FileExistsError:
                        return False
                    return True

                sys.path.remove({str(tmp_path)!r})
                del sys.modules["math_verify"]
                import math_verify
            """)
            + textwrap.dedent(script)
        )
        monkeypatch.syspath_prepend(tmp_path)

    return scripted


def has_ended(pid):
    """Whether a process ends, or has; also if it is nobody's child any more."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 60)[0])
    finally:
        os.close(descriptor)


COMPLETIONS = [
    (r"It is $\boxed{34}$.", "34"),
    (r"It is $\boxed{35}$.", "34"),
    (r"\boxed{\frac{1}{2}}", r"$\frac{2}{4}$"),
    (r"\boxed{50\%}", "0.5"),
    (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$"),
    (r"\boxed{\{1, 2\}}", r"$\{2, 1\}$"),
    (r"\boxed{1{,}234 \text{ km}}", "1234"),
    (r"\boxed{0.333}", r"$\frac{1}{3}$"),
    (r"\boxed{34", "34"),
    ("Answer: 34", "34"),
    ("Answer: $34$", "34"),
    (r"\boxed{34}", "no number in here"),
]


def test_verdicts_are_those_of_accuracy_reward(rewards):
    texts, golds = zip(*COMPLETIONS, strict=True)
    conversations = [[{"role": "assistant", "content": text}] for text in texts]
    expected = accuracy_reward(conversations, golds)
    assert {1.0, 0.0, None} == set(expected)
    assert rewards["patient"](conversations, golds) == rewards["patient"](texts, golds) == expected


def test_rewards_come_in_the_order_of_the_completions(rewards):
    golds = [str(i) for i in range(300)]
    texts = [f"\\boxed{{{i if i % 3 else i + 1}}}" for i in range(300)]
    assert rewards["patient"](texts, golds) == [float(i % 3 > 0) for i in range(300)]
    assert rewards["patient"]([], []) == []


HOSTILE = {
    "a megabyte of dollars": ("answer" + "$" * 1_000_000, 0.0),
    "nested braces": ("\\boxed{" + "{" * 100_000 + "34" + "}" * 100_000 + "}", 0.0),
    "power tower": (ENDLESS, 0.0),
    "factorial": (r"\boxed{100000000!}", 0.0),
    "digits": ("\\boxed{" + "9" * 500_000 + "}", 0.0),
    "NUL": ("\\boxed{3\x004}", 0.0),
    "lone surrogate": ("\ud800\\boxed{34\udfff}", 0.0),
    "right to left": ("\u202e\\boxed{34}\u202c", 1.0),
    "zalgo": ("\\boxed{3" + "\u0301" * 10_000 + "4}", 0.0),
    "code": (r"\boxed{__import__('os').abort()}", 0.0),
}


def test_hostile_completions_get_verdicts_and_leave_the_others_theirs(rewards):
    texts, expected = ["\\boxed{34}"], [1.0]
    for text, verdict in HOSTILE.values():
        texts += [text, "\\boxed{34}", "\\boxed{35}"]
        expected += [verdict, 1.0, 0.0]
    assert rewards["impatient"](texts, ["34"] * len(texts)) == expected


STALL = """
parse, verify = math_verify.parse, math_verify.verify

def stalling_parse(text, **settings):
    if text == "7" and (FOR_GOOD or once("gold")):
        time.sleep(3600)
    return parse(text, **settings)

def stalling_verify(golds, answers, **settings):
    if "8" in answers and once("completion"):
        time.sleep(3600)
    return verify(golds, answers, **settings)

math_verify.parse, math_verify.verify = stalling_parse, stalling_verify
"""


def test_one_stall_costs_no_verdict(light, scripted, pool, caplog):
    scripted("FOR_GOOD = False\n" + STALL)
    texts, logged = ["$\\boxed{7}$", "\\boxed{9}", "\\boxed{8}", "\\boxed{08}"], {}
    golds = ["7", "7", "08", "08"]
    assert pool(timeout=0.2, num_workers=2)(texts, golds, log_metric=logged.__setitem__) == [1.0, 0.0, 1.0, 1.0]
    assert logged == {"math_verify/killed": 0.0, "math_verify/worker_restarts": 2.0, "math_verify/hopeless_golds": 0.0}
    assert not caplog.records


def test_a_gold_answer_that_stalls_twice_is_given_up_and_named_once(light, scripted, pool, caplog):
    scripted("FOR_GOOD = True\n" + STALL)
    reward, logged = pool(timeout=0.2, num_workers=1), {}
    with caplog.at_level(logging.WARNING):
        for killed, restarts in ((1 / 3, 2.0), (0.0, 0.0)):
            texts = ["\\boxed{7}", "\\boxed{5}", "\\boxed{6}"]  # one is tried for both of the gold answer
            assert reward(texts, ["7", "7", "6"], log_metric=logged.__setitem__) == [None, None, 1.0]
            assert (logged["math_verify/killed"], logged["math_verify/worker_restarts"]) == (killed, restarts)
            assert logged["math_verify/hopeless_golds"] == 1.0
    (record,) = caplog.records
    assert "could not read the gold answer '7' within" in record.message


def test_a_completion_that_waits_for_the_processor_has_not_used_its_time(light, scripted, pool):
    # By the clock it takes half as long again as the limit, by the processor next to nothing.
    scripted("""
        parse = math_verify.parse

        def slow_parse(text, **settings):
            time.sleep(0.75 if text == "7" else 0.0)
            return parse(text, **settings)

        math_verify.parse = slow_parse
    """)
    logged = {}
    assert pool(timeout=0.5, num_workers=1)(["\\boxed{7}"], ["7"], log_metric=logged.__setitem__) == [1.0]
    assert logged["math_verify/worker_restarts"] == 0.0


def test_a_completion_that_needs_too_much_memory_is_incorrect_and_the_next_one_is_not(pool):
    reward, logged = pool(timeout=60.0, num_workers=1, memory_limit=256 * MIB), {}
    texts = ["\\boxed{34}", "answer: $$" + " " * 3_000_000 + "34$$", "$\\boxed{34}$"]
    assert reward(texts, ["34"] * 3, log_extra=logged.__setitem__) == [1.0, 0.0, 1.0]
    assert logged["math_verify_answer"][1] == "[unparseable]"  # not because of the time


def test_a_worker_that_has_cached_too_much_is_replaced_before_it_costs_a_verdict(pool):
    reward = pool(num_workers=1, memory_limit=256 * MIB)
    reward(["\\boxed{1}"], ["1"])
    started = pids(reward)
    # math-verify caches its last matches, and with them these texts of 20 MB each
    assert reward([f"\\boxed{{{i}}}" + "\U0001f600" * 5_000_000 for i in range(4)], ["3"] * 4) == [0.0, 0.0, 0.0, 1.0]
    assert pids(reward) != started
    before = math_worker._address_space()  # what tells it, also where nothing of it was touched
    with mmap.mmap(-1, 1024 * MIB):
        assert math_worker._address_space() - before >= 1024 * MIB


def test_a_worker_that_dies_by_accident_costs_no_verdict(light, pool):
    reward = pool(num_workers=2)
    reward(["\\boxed{1}", "\\boxed{2}", "\\boxed{3}"], ["1"] * 3)
    for worker in reward._workers:
        if worker.is_ready:
            os.kill(worker.process.pid, signal.SIGKILL)
    assert reward(["\\boxed{1}", "\\boxed{2}", "\\boxed{3}"], ["1"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("text", ["\\boxed{7}", "\\boxed{7}" + " " * 200_000], ids=["waits", "is not read"])
def test_a_worker_that_is_stopped_from_outside_is_replaced_and_costs_no_verdict(light, pool, monkeypatch, text):
    reward = pool(num_workers=1)
    assert reward(["\\boxed{7}"], ["7"]) == [1.0]
    (worker,) = reward._workers
    os.kill(worker.process.pid, signal.SIGSTOP)
    waits = iter([0.2, 0.2])  # then as long as a new worker needs
    monkeypatch.setattr(MathVerifyReward, "_patience", property(lambda self: next(waits, 60.0)), raising=False)
    assert reward([text, "\\boxed{8}"], ["7", "7"]) == [1.0, 0.0]
    assert worker.process.poll() == -signal.SIGKILL


def test_limits_hold_off_the_main_thread_and_threads_may_share_one_reward(rewards):
    found = {}

    def score(i):
        found[i] = rewards["impatient"]([f"\\boxed{{{i}}}", ENDLESS], [str(i)] * 2)

    threads = [threading.Thread(target=score, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: [1.0, 0.0], 1: [1.0, 0.0]}


def test_what_was_read_and_what_was_killed_is_logged(pool):
    texts, logged = ["$\\boxed{34}$", "nothing", ENDLESS, "\\boxed{34}", "\\boxed{34\udfff}"], {}
    logs = {"log_extra": logged.__setitem__, "log_metric": logged.__setitem__}
    pool(timeout=1.0, num_workers=1)(texts, ["34", "34", "34", None, "34"], **logs)
    assert logged.pop("math_verify/worker_restarts") >= 1.0  # once more where the clock was first on a busy machine
    assert logged == {
        "math_verify_answer": ["34", "[unparseable]", "[killed]", "[skipped]", "34?"],
        "math_verify/killed": 1 / 5,
        "math_verify/hopeless_golds": 0.0,
    }


def test_workers_start_with_the_first_completions_and_no_more_than_are_needed(light, pool):
    reward = pool(num_workers=3)
    assert pids(reward) == []
    reward(["\\boxed{34}"], ["34"])
    assert len(pids(reward)) == 1
    reward.close()
    assert pids(reward) == []
    assert reward(["\\boxed{34}"], ["34"]) == [1.0]


def test_a_pickled_reward_keeps_its_settings_and_starts_workers_of_its_own():
    copy = pickle.loads(pickle.dumps(MathVerifyReward(timeout=60.0, num_workers=2)))
    assert (copy.timeout, copy.num_workers, copy.memory_limit) == (60.0, 2, 1024 * MIB)
    assert pids(copy) == []
    assert copy.__name__ == math_verify_reward.__name__ == "math_verify_reward"


def test_a_forked_process_starts_its_own_workers_and_does_not_touch_its_parents(light, pool):
    reward = pool(num_workers=2)
    reward(["\\boxed{34}"], ["34"])
    before, child = pids(reward), os.fork()
    if child == 0:
        # A failed assertion must not run the rest of the test session twice.
        is_correct = pids(reward) == [] and reward(["\\boxed{34}", "\\boxed{3}"], ["34"] * 2) == [1.0, 0.0]
        reward.close()
        os._exit(0 if is_correct else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert reward(["\\boxed{34}", "\\boxed{3}"], ["34"] * 2) == [1.0, 0.0]
    assert set(before) <= set(pids(reward))


@linux_only
def test_an_exception_in_the_trainer_leaves_no_worker_behind(light, pool):
    reward = pool(timeout=600.0, num_workers=1)
    reward(["\\boxed{1}"], ["1"])
    started = pids(reward)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C does
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            reward([ENDLESS], ["1"])
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert all(has_ended(pid) for pid in started)
    assert reward(["\\boxed{1}"], ["1"]) == [1.0]


@pytest.mark.parametrize(
    ("on_this_machine", "num_workers"),
    # 12 cores: 8 workers at most for one process, 12 / 2 = 6 for each of two, at least one for each of 24.
    [(None, 8), ("", 8), ("0", 8), ("-1", 8), ("many", 8), ("1", 8), ("2", 6), (" 2 ", 6), ("24", 1)],
)
def test_the_processes_of_a_machine_share_its_cores(monkeypatch, on_this_machine, num_workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if on_this_machine is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", on_this_machine)
    assert MathVerifyReward().num_workers == num_workers


TRAINER = """
    import sys, threading
    from trl_dapo.rewards import MathVerifyReward

    reward = MathVerifyReward(timeout=600.0, num_workers=1)
    reward(["\\\\boxed{1}"], ["1"])
    if sys.argv[1] == "busy":
        threading.Thread(target=reward, args=([r"\\boxed{9^{9^{9^{9}}}}"], ["1"]), daemon=True).start()
        while not reward._workers[0].batch:
            pass
    print(*(worker.process.pid for worker in reward._workers), flush=True)
    if sys.argv[2] == "raise":
        raise RuntimeError("the trainer failed")
    sys.stdin.read()
"""


@linux_only
@pytest.mark.parametrize(
    ("work", "end"),
    [("idle", "SIGKILL"), *(("busy", end) for end in ("SIGTERM", "SIGKILL", "SIGINT", "raise", "exit"))],
)
def test_no_worker_outlives_the_trainer(light, work, end):
    command = [sys.executable, "-c", textwrap.dedent(TRAINER), work, end]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes) as trainer:
        started = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(started) == 1
        if end.startswith("SIG"):
            trainer.send_signal(getattr(signal, end))
        trainer.stdin.close()
        trainer.wait()
    assert all(has_ended(pid) for pid in started)


def test_a_worker_that_cannot_start_is_an_error_with_the_reason(monkeypatch, capfd, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no such luck')")
    monkeypatch.syspath_prepend(tmp_path)
    reward = MathVerifyReward(num_workers=1)
    with pytest.raises(RuntimeError, match="ended with status 1 before it was ready"):
        reward(["\\boxed{1}"], ["1"])
    assert pids(reward) == []
    assert "no such luck" in capfd.readouterr().err


def test_a_worker_that_is_killed_while_it_starts_is_started_once_more(light, scripted, pool):
    scripted("if once('start'): os.kill(os.getpid(), signal.SIGKILL)")
    reward, logged = pool(num_workers=1), {}
    assert reward(["\\boxed{1}", "\\boxed{2}"], ["1", "1"], log_metric=logged.__setitem__) == [1.0, 0.0]
    assert logged["math_verify/worker_restarts"] == 1.0


def test_workers_that_are_killed_whenever_they_start_are_an_error(light, scripted):
    scripted("os.kill(os.getpid(), signal.SIGKILL)")
    reward = MathVerifyReward(num_workers=2)
    with pytest.raises(RuntimeError, match=r"ended with status -9 before it was ready.*memory"):
        reward(["\\boxed{1}", "\\boxed{2}"], ["1", "1"])
    assert pids(reward) == []


def test_entries_that_python_does_not_import_from_are_not_in_the_workers_path(pool, monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text(
        "raise ImportError('of a pathlib.Path, from which Python imports nothing')"
    )
    monkeypatch.setattr(sys, "path", [tmp_path, None, *sys.path])
    assert pool(num_workers=1)(["\\boxed{2}"], ["2"]) == [1.0]


def test_workers_start_with_an_editable_install_in_the_user_site(tmp_path):
    # As setuptools installs a project that it cannot name by a folder: a line that Python runs as it starts.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    user_site = tmp_path / "lib" / version / "site-packages"
    user_site.mkdir(parents=True)
    folder = str(Path(trl_dapo.__path__[0]).parent)
    finder = f"lambda name, *_, m=m: m.PathFinder.find_spec(name, [{folder!r}]) if name == 'trl_dapo' else None"
    hook = (
        f"import sys, types, importlib.machinery as m; sys.meta_path.append(types.SimpleNamespace(find_spec={finder}))"
    )
    (user_site / "editable.pth").write_text(f"{hook}\n")
    # A virtual environment has no user site: the interpreter below it, with the libraries of this one.
    libraries = os.pathsep.join(entry for entry in sys.path if entry.endswith("site-packages"))
    code = "from trl_dapo.rewards import math_verify_reward; print(math_verify_reward(['\\\\boxed{1}'], ['1']))"
    command = [getattr(sys, "_base_executable", sys.executable), "-c", code]
    environment = {**os.environ, "PYTHONUSERBASE": str(tmp_path), "PYTHONPATH": libraries}
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("[1.0]\n", 0), ran.stderr


@pytest.mark.parametrize(
    "settings", [{"timeout": 0}, {"timeout": float("inf")}, {"num_workers": 0}, {"memory_limit": 1_000_000}]
)
def test_limits_that_cannot_be_met_are_refused_with_their_value(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"`{name}`.*got {value}"):
        MathVerifyReward(**settings)


def test_the_processes_that_train_on_one_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    assert MathVerifyReward().num_workers == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert MathVerifyReward().num_workers == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert MathVerifyReward().num_workers == 1
