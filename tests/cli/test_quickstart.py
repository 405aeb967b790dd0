# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
import io

from rich.console import Console

from trl_dapo.cli.quickstart import Problems, exact_answer_reward, run_quickstart
from trl_dapo.evaluation import compare


def test_held_out_problems_are_never_drawn_not_even_the_other_way_round():
    problems = Problems(seed=42)
    held_out = {problem.text for problem in problems.held_out}
    assert len(held_out) == 1000
    for problem in problems.draw(20_000):
        operator = "*" if "*" in problem.text else "+"
        left, right = problem.text.split(operator)
        assert problem.text not in held_out
        assert f"{right}{operator}{left}" not in held_out


def test_only_the_exact_answer_is_rewarded():
    completions = [[{"role": "assistant", "content": text}] for text in ("220", "22", "2200")]
    assert exact_answer_reward(completions, ["220"] * 3) == [1.0, 0.0, 0.0]


def test_a_short_quickstart_leaves_models_a_picture_and_the_next_command(tmp_path):
    console = Console(file=(output := io.StringIO()), force_terminal=False, width=100)
    change = run_quickstart(tmp_path, num_warm_up_steps=2, num_steps=1, console=console)
    text = output.getvalue()
    assert str(tmp_path / "trained") in text
    assert "trl-dapo train --config smollm2_135m_cpu" in text
    assert "95 %" in text
    assert "Warm-up, step 1 of 2: loss " in text  # where no bar is drawn
    assert (tmp_path / "trained" / "model.safetensors").exists()
    assert (tmp_path / "trained" / "tokenizer.json").exists()
    assert (tmp_path / "run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert change["num_problems"] == 1000
    assert compare(tmp_path / "eval_warm_up", tmp_path / "eval_trained") == change
    assert "trl-dapo compare" in text
